//! Settings as text, as the host library has them: `name:value,name:value`.

use crate::host;
use std::ffi::c_int;
use std::fs::File;
use thermalloc_cuda_pool::{Backing, Pool, PoolBuilder, Reuse};

/// What was chosen for the device pool itself; the rest is as the host library has it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Chosen {
    pub(crate) window: bool,
    pub(crate) decay: bool,
    pub(crate) background: bool,
}

/// How a device's pool is made: as the host library is set, then by `THERMALLOC_CUDA_CONF`, then by
/// the caller.
pub(crate) fn builder(device: c_int, conf: Option<&str>) -> Result<(PoolBuilder, Chosen), String> {
    let mut builder = Pool::builder(device);
    if let Some(window_ms) = host::window_ms() {
        builder = builder.hot_window_ms(window_ms);
    }
    if let Some(decay_ms) = host::decay_ms() {
        builder = builder.decay_ms(decay_ms);
    }
    if let Some(ledger) = host::ledger() {
        builder = builder.ledger(ledger);
    }
    let mut chosen = Chosen::default();
    if let Ok(text) = std::env::var("THERMALLOC_CUDA_CONF") {
        builder = apply(builder, &mut chosen, device, &text)?;
    }
    if let Some(text) = conf {
        builder = apply(builder, &mut chosen, device, text)?;
    }
    if !chosen.background {
        // Where the host library is, its background thread sets the pace.
        builder = builder.background(!host::paces());
    }
    Ok((builder, chosen))
}

fn apply(
    mut builder: PoolBuilder,
    chosen: &mut Chosen,
    device: c_int,
    text: &str,
) -> Result<PoolBuilder, String> {
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let wrong =
            || format!("thermalloc: THERMALLOC_CUDA_CONF: {pair}: no such setting or value");
        let (name, value) = pair.split_once([':', '=']).ok_or_else(wrong)?;
        let (name, value) = (name.trim(), value.trim());
        let number = || bytes(value).ok_or_else(wrong);
        chosen.window |= name == "hot_window_ms";
        chosen.decay |= name == "decay_ms";
        chosen.background |= name == "background";
        builder = match name {
            "limit_bytes" => builder.limit_bytes(number()?),
            "limit_percent" => builder.limit_percent(number()?),
            "hot_window_ms" => builder.hot_window_ms(number()?),
            "decay_ms" if value == "-1" => builder.decay_ms(None),
            "decay_ms" => builder.decay_ms(Some(number()?)),
            "wait_ms" => builder.wait_ms(Some(number()?).filter(|&ms| ms > 0)),
            "pressure_percent" => builder.pressure_percent(number()?),
            "record" => builder.record(record(value, device)?),
            "history" => builder.history(number()? as usize),
            "background" => builder.background(number()? != 0),
            "backing" => builder.backing(match value {
                "virtual" => Backing::Virtual,
                "driver_pool" => Backing::DriverPool,
                "plain" => Backing::Plain,
                _ => return Err(wrong()),
            }),
            "reuse" => builder.reuse(match value {
                "grow" => Reuse::Grow,
                "wait" => Reuse::Wait,
                "complete" => Reuse::Complete,
                _ => return Err(wrong()),
            }),
            _ => return Err(wrong()),
        };
    }
    Ok(builder)
}

/// The file to record to: `%p` in its name is the process, `%d` the device.
fn record(name: &str, device: c_int) -> Result<File, String> {
    let path =
        name.replace("%p", &std::process::id().to_string()).replace("%d", &device.to_string());
    File::create(&path).map_err(|error| format!("thermalloc: record: {path}: {error}"))
}

/// A number, with a suffix K, M or G where it is of bytes.
fn bytes(text: &str) -> Option<u64> {
    let (digits, scale) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 1 << 10),
        b'M' | b'm' => (&text[..text.len() - 1], 1 << 20),
        b'G' | b'g' => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(scale)
}
