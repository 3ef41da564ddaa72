//! `thermalloc-lab`: replay traces under purging policies, make traces, look at them.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use thermalloc::control::options;
use thermalloc_lab::policy::{Kind, Settings};
use thermalloc_lab::sim::{self, Outcome};
use thermalloc_lab::trace::Trace;
use thermalloc_lab::{generate, picture, table};

/// Replays allocation traces under purging policies, on a simulated kernel and clock.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replay a trace under policies, and print what each costs
    Run(Run),
    /// Write a made-up trace to a file or to standard output
    Generate(Generate),
    /// Print the figures of a trace, such as one that the option trace_file has recorded
    RecordInfo {
        /// The trace
        file: PathBuf,
    },
}

#[derive(Args)]
struct Source {
    /// steady, varied, periodic:MILLISECONDS, mixed:MILLISECONDS, bursty, ramp, idle, or file:PATH
    #[arg(long)]
    trace: String,
    /// What made-up traces depend on
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Args)]
struct Run {
    #[command(flatten)]
    source: Source,
    /// Separated by commas: thermalloc, jemalloc, jemalloc-bg, tcmalloc, glibc, never
    #[arg(long, value_delimiter = ',', value_parser = policy, default_value = "thermalloc,jemalloc,tcmalloc,glibc,never")]
    policies: Vec<Kind>,
    /// An option of thermalloc's, as in hot_window_ms=8000 or dirty_decay_ms=-1; may be repeated
    #[arg(long = "set", value_name = "NAME=VALUE")]
    settings: Vec<String>,
    /// Write resident memory and faults over time as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw resident memory and faults over time
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Time between two samples of CSV and picture, milliseconds [default: a thousandth of the trace]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    sample_ms: Option<u64>,
}

#[derive(Args)]
struct Generate {
    #[command(flatten)]
    source: Source,
    /// Where to write it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(run) => run.run(),
        Command::Generate(generate) => generate.run(),
        Command::RecordInfo { file } => record_info(&file),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            let _ = writeln!(io::stderr(), "thermalloc-lab: {what}");
            ExitCode::FAILURE
        }
    }
}

fn policy(name: &str) -> Result<Kind, String> {
    Kind::by_name(name).ok_or_else(|| "no such policy".to_owned())
}

/// The settings that `NAME=VALUE` items make.
fn settings(items: &[String]) -> Result<Settings, String> {
    let mut settings = Settings::default();
    for item in items {
        let wrong = |why: &str| format!("--set {item}: {why}");
        let (name, value) = item.split_once('=').ok_or_else(|| wrong("not NAME=VALUE"))?;
        let row = options::find(name).ok_or_else(|| wrong("no such option of thermalloc"))?;
        let number: i64 = value.parse().map_err(|_| wrong("not a number"))?;
        if !(row.min..=row.max).contains(&number) {
            return Err(wrong(&format!("not from {} to {}", row.min, row.max)));
        }
        let ms = u64::try_from(number).ok();
        match name {
            "hot_window_ms" => settings.window_ms = ms.unwrap_or(0),
            "dirty_decay_ms" => settings.decay_ms = ms,
            _ => return Err(wrong("has no effect here: hot_window_ms and dirty_decay_ms have")),
        }
    }
    // As the option table has it: a decay of 0 purges at once, with no window.
    if settings.decay_ms == Some(0) {
        settings.window_ms = 0;
    }
    Ok(settings)
}

impl Source {
    fn trace(&self) -> Result<Trace, String> {
        if let Some(path) = self.trace.strip_prefix("file:") {
            return read(&PathBuf::from(path));
        }
        generate::by_name(&self.trace, self.seed).ok_or_else(|| {
            format!(
                "{}: no such trace: see --trace in the help (periods: from 1000 ms on)",
                self.trace
            )
        })
    }
}

fn read(path: &PathBuf) -> Result<Trace, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let file = File::open(path).map_err(|error| wrong(&error))?;
    Trace::read(BufReader::new(file)).map_err(|error| wrong(&error))
}

impl Run {
    fn run(&self) -> Result<(), String> {
        let settings = settings(&self.settings)?;
        let trace = self.source.trace()?;
        let interval_us = self.sample_ms.map_or(trace.end_us.div_ceil(1000), |ms| ms * 1000);
        let outcomes: Vec<Outcome> = self
            .policies
            .iter()
            .map(|&kind| sim::replay(&trace, kind, settings, interval_us))
            .collect();
        table::write(&outcomes, io::stdout().lock()).map_err(|error| error.to_string())?;
        if let Some(path) = &self.csv {
            to_file(path, |file| table::write_csv(&outcomes, file))?;
        }
        if let Some(path) = &self.svg {
            picture::draw(&self.source.trace, &outcomes, path)
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }
}

impl Generate {
    fn run(&self) -> Result<(), String> {
        let trace = self.source.trace()?;
        match &self.out {
            Some(path) => to_file(path, |file| trace.write(file)),
            None => trace.write(BufWriter::new(io::stdout().lock())).map_err(|e| e.to_string()),
        }
    }
}

fn to_file(
    path: &PathBuf,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), String> {
    let done = || {
        let mut file = BufWriter::new(File::create(path)?);
        write(&mut file)?;
        file.flush()
    };
    done().map_err(|error| format!("{}: {error}", path.display()))
}

fn record_info(path: &PathBuf) -> Result<(), String> {
    let trace = read(path)?;
    let s = trace.summary();
    let mib = |bytes: u64| thermalloc_lab::mib(bytes.div_ceil(4096));
    let mut out = io::stdout().lock();
    let mut lines = || -> io::Result<()> {
        writeln!(
            out,
            "lasts             {:.3} s",
            std::time::Duration::from_micros(trace.end_us).as_secs_f64()
        )?;
        writeln!(out, "allocated         {} blocks, {:.1} MiB", s.allocs, mib(s.bytes))?;
        writeln!(out, "freed, resized    {}, {}", s.frees, s.resizes)?;
        writeln!(out, "live at the peak  {:.1} MiB", mib(s.peak_bytes))?;
        writeln!(out, "live at the end   {} blocks, {:.1} MiB", s.left.0, mib(s.left.1))?;
        writeln!(out, "largest block     {:.1} MiB", mib(s.largest_bytes))?;
        writeln!(out, "events lost       {}", trace.dropped)
    };
    lines().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(items: &[&str]) -> Result<Settings, String> {
        settings(&items.iter().map(|&item| item.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn settings_are_those_of_the_option_table() {
        let s = set(&["hot_window_ms=8000", "dirty_decay_ms=-1"]).unwrap();
        assert_eq!((s.window_ms, s.decay_ms), (8000, None));
        let s = set(&["dirty_decay_ms=0"]).unwrap();
        assert_eq!((s.window_ms, s.decay_ms), (0, Some(0)));
        for bad in ["hot_window_ms", "hot_window_ms=60001", "colour=1", "narenas=1", "rseq=x"] {
            assert!(set(&[bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
