//! `prof convert`: foreign formats.
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::analysis::At;
use super::{chrome, flame, heap_v2, pprof, torch, write};
use crate::failure::Failure;

/// A format of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// profile.proto, gzipped: go tool pprof, speedscope, Perfetto
    Pprof,
    /// jemalloc's text: jeprof
    HeapV2,
    /// Stacks in lines: flamegraph.pl, inferno, speedscope
    Folded,
    /// Counters in JSON: Perfetto, chrome://tracing
    Chrome,
    /// PyTorch's memory snapshot of the host's memory: pytorch.org/memory_viz, _memory_viz.py
    Torch,
}

/// Translate a profile for other tools.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// A profile (.thprof) or log (.thlog)
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// To which format
    #[arg(long, value_enum)]
    to: Format,

    /// Where to
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,

    /// The moment: peak, end, or seconds after the start
    #[arg(long, value_name = "WHEN", default_value = "peak")]
    at: At,

    #[command(flatten)]
    reading: super::Reading,
}

pub(crate) fn convert(options: &Options) -> Result<(), Failure> {
    let a = options.reading.read(&options.file)?;
    let instant = a.at(options.at)?;
    let bytes = match options.to {
        Format::Pprof => pprof::write(&a, &instant),
        Format::HeapV2 => heap_v2::write(&a, &instant).into_bytes(),
        Format::Folded => {
            let lines = flame::folded(&a, &instant, flame::Measure::Live)?;
            (lines.join("\n") + "\n").into_bytes()
        }
        Format::Chrome => chrome::write(&a).to_string().into_bytes(),
        Format::Torch => torch::write(&a)?,
    };
    write(options.output.as_deref(), &bytes)
}
