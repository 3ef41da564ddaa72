//! Settings as text, as the host library has them: `name:value,name:value`.

use std::ffi::c_int;
use thermalloc::control::host::HostTable;
use thermalloc_cuda_pool::{Backing, Pool, PoolBuilder, Reuse};

/// libthermalloc's table, where the process has that library.
fn host() -> Option<&'static HostTable> {
    // SAFETY: the name is a C string.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"thermalloc_host_v1".as_ptr()) };
    // SAFETY: the symbol is that of the host library, which is never unloaded.
    unsafe { HostTable::from_ptr(symbol.cast()) }
}

fn host_number(name: &str) -> Option<u64> {
    let mut text = [0; 64];
    host()?.option(name, &mut text)?.parse().ok()
}

/// How a device's pool is made: as the host allocator is set, then by `THERMALLOC_CUDA_CONF`, then
/// by the caller.
pub(crate) fn builder(device: c_int, conf: Option<&str>) -> Result<PoolBuilder, String> {
    let mut builder = Pool::builder(device).background(true);
    if let Some(window_ms) = host_number("hot_window_ms") {
        builder = builder.hot_window_ms(window_ms);
    }
    if let Some(decay_ms) = host_number("dirty_decay_ms") {
        builder = builder.decay_ms(Some(decay_ms));
    }
    if let Ok(text) = std::env::var("THERMALLOC_CUDA_CONF") {
        builder = apply(builder, &text)?;
    }
    match conf {
        Some(text) => apply(builder, text),
        None => Ok(builder),
    }
}

fn apply(mut builder: PoolBuilder, text: &str) -> Result<PoolBuilder, String> {
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let wrong =
            || format!("thermalloc: THERMALLOC_CUDA_CONF: {pair}: no such setting or value");
        let (name, value) = pair.split_once([':', '=']).ok_or_else(wrong)?;
        let (name, value) = (name.trim(), value.trim());
        let number = || bytes(value).ok_or_else(wrong);
        builder = match name {
            "limit_bytes" => builder.limit_bytes(number()?),
            "limit_percent" => builder.limit_percent(number()?),
            "hot_window_ms" => builder.hot_window_ms(number()?),
            "decay_ms" if value == "-1" => builder.decay_ms(None),
            "decay_ms" => builder.decay_ms(Some(number()?)),
            "wait_ms" => builder.wait_ms(Some(number()?).filter(|&ms| ms > 0)),
            "pressure_percent" => builder.pressure_percent(number()?),
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
