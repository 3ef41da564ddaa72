//! `thermalloc prof`: profiles of programs, made, told and translated.
//!
//! Invariant: a report's figures are sums over recorded blocks, each with the weight that it was given when
//! it was recorded; nothing is guessed that the file does not say, and what it lacks is noted.
mod analysis;
mod breakdown;
mod chrome;
mod classes;
mod clock;
mod compare;
mod convert;
mod flame;
mod fragmentation;
mod growth;
mod heap_v2;
mod leaks;
mod lifetimes;
mod operators;
mod pprof;
mod profile;
mod report;
mod rss;
mod run;
mod runtimes;
mod svg;
mod symbols;
mod table;
mod timeline;
mod torch;

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::Value;

use self::analysis::At;
pub(crate) use self::analysis::{Analysis, name_of};
pub(crate) use self::profile::{Mapping, Pool, Profile, float};
pub(crate) use self::table::{Table, bytes, count, size};
use crate::failure::Failure;

/// Profile a program, and tell what its memory is used for.
#[derive(Args, Debug)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Options),
    /// Who holds memory: components, operators and scopes, call sites, and how these grew. Of two files of a
    /// process, how they grew from the one to the other
    Report(Common),
    /// A flame graph (-o FILE.svg), or folded stacks
    Flame {
        #[command(flatten)]
        common: Common,
        /// What widths stand for
        #[arg(long, value_enum, default_value = "live")]
        measure: flame::Measure,
    },
    /// Call sites that grow and keep what they allocate; two dumps of a process are compared
    Leaks(Common),
    /// Why the resident size is what it is
    Rss(Common),
    /// What was live when most was, and how it came to that (-o FILE.svg)
    Peak(Common),
    /// How long blocks live, by call site (-o FILE.svg)
    Lifetimes(Common),
    /// Memory that is held and not used, within blocks and between them; a map of pages (-o FILE.svg)
    Fragmentation(Common),
    /// Memory by operator of TensorFlow, or by scope and layer, and by step
    Operators {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        choice: operators::Choice,
    },
    /// What a model needs: weights, gradients, optimizer, activations
    Breakdown(Common),
    /// KV cache and scratch memory of a sequence, and how many fit
    Capacity {
        #[command(flatten)]
        common: Common,
        /// Sequences that the profiled program had at a time
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
        sequences: u64,
        /// Memory that there is, bytes; may end in K, M, G
        #[arg(long, value_name = "BYTES", value_parser = byte_count)]
        limit: u64,
    },
    /// Two runs side by side
    Compare(Common),
    Convert(convert::Options),
    /// Print the rules by which call stacks are assigned to components
    Classes,
}

/// What all reports take.
#[derive(Args, Debug)]
pub(crate) struct Common {
    /// Profiles (.thprof) or logs (.thlog)
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Write JSON
    #[arg(long)]
    json: bool,

    /// Write to this file; a name in .svg or .html gets the picture, where the report has one
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,

    /// The moment: peak, end, or seconds after the start. A file with no events has its dumps to choose
    /// from
    #[arg(long, value_name = "WHEN", default_value = "peak")]
    at: At,

    #[command(flatten)]
    reading: Reading,

    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
}

/// How a profile is read.
#[derive(Debug, clap::Args)]
struct Reading {
    /// Rules for components, before the built-in ones
    #[arg(long, value_name = "PATH")]
    classes: Option<PathBuf>,

    /// Look up files and lines too, which may take long
    #[arg(long)]
    lines: bool,
}

impl Reading {
    fn read(&self, path: &Path) -> Result<Analysis, Failure> {
        Analysis::read(path, self.classes.as_deref(), self.lines)
    }
}

impl Common {
    fn first(&self) -> &Path {
        // clap sees to it that there is one.
        self.files.first().map_or(Path::new(""), PathBuf::as_path)
    }

    fn read(&self, path: &Path) -> Result<Analysis, Failure> {
        self.reading.read(path)
    }

    fn analysis(&self) -> Result<Analysis, Failure> {
        self.read(self.first())
    }

    /// The last file, and the one before it.
    fn last_two(&self) -> Result<(Analysis, Option<Profile>), Failure> {
        match self.files.as_slice() {
            [.., before, last] => Ok((self.read(last)?, Some(Profile::read(before)?))),
            [only] => Ok((self.read(only)?, None)),
            [] => Err(Failure::usage("no profile")),
        }
    }

    fn put(&self, output: &Output) -> Result<(), Failure> {
        let wants_picture = self.output.as_deref().is_some_and(|path| {
            path.extension().is_some_and(|ending| ending == "svg" || ending == "html")
        });
        let text = if self.json {
            format!("{:#}\n", output.json)
        } else if wants_picture {
            output.picture.clone().ok_or_else(|| {
                Failure::cannot_run("output", "this report has no picture", "leave out -o")
            })?
        } else {
            output.text.clone()
        };
        write(self.output.as_deref(), text.as_bytes())
    }
}

/// What a report says, in each form.
#[derive(Clone, Debug, Default)]
pub(crate) struct Output {
    pub(crate) text: String,
    pub(crate) json: Value,
    pub(crate) picture: Option<String>,
}

/// Writes to a file, or to standard output; a reader that closed its end is no error.
fn write(path: Option<&Path>, bytes: &[u8]) -> Result<(), Failure> {
    let hint = "name another file by -o";
    match path {
        Some(path) => {
            fs::write(path, bytes).map_err(|why| Failure::cannot_run(path.display(), why, hint))
        }
        None => match io::stdout().write_all(bytes) {
            Err(why) if why.kind() != io::ErrorKind::BrokenPipe => {
                Err(Failure::cannot_run("standard output", why, hint))
            }
            _ => Ok(()),
        },
    }
}

/// Does what the command line says.
pub(crate) fn prof(options: Options) -> Result<(), Failure> {
    let (common, output) = match options.command {
        Command::Run(options) => return Err(run::run(options)),
        Command::Convert(options) => return convert::convert(&options),
        Command::Classes => {
            return write(None, thermalloc_prof_format::classes::BUILT_IN.as_bytes());
        }
        Command::Report(common) => {
            let (last, before) = common.last_two()?;
            let output = report::report(&last, before.as_ref(), common.at, common.top)?;
            (common, output)
        }
        Command::Flame { common, measure } => {
            let output = flame::report(&common.analysis()?, common.at, measure)?;
            (common, output)
        }
        Command::Leaks(common) => {
            let (last, before) = common.last_two()?;
            let output = leaks::report(&last, before.as_ref(), common.top)?;
            (common, output)
        }
        Command::Rss(common) => {
            let output = rss::report(&common.analysis()?, common.top)?;
            (common, output)
        }
        Command::Peak(common) => {
            let output = timeline::report(&common.analysis()?, common.top)?;
            (common, output)
        }
        Command::Lifetimes(common) => {
            let output = lifetimes::report(&common.analysis()?, common.top)?;
            (common, output)
        }
        Command::Fragmentation(common) => {
            let all: Result<Vec<Analysis>, Failure> =
                common.files.iter().map(|path| common.read(path)).collect();
            let output = fragmentation::report(&all?, common.top)?;
            (common, output)
        }
        Command::Operators { common, choice } => {
            let output = operators::report(&common.analysis()?, &choice, common.top)?;
            (common, output)
        }
        Command::Breakdown(common) => {
            let output = breakdown::report(&common.analysis()?)?;
            (common, output)
        }
        Command::Capacity { common, sequences, limit } => {
            let output = breakdown::capacity(&common.analysis()?, sequences, limit)?;
            (common, output)
        }
        Command::Compare(common) => {
            let [old, new] = common.files.as_slice() else {
                return Err(Failure::usage("compare takes two profiles"));
            };
            let (old, new) = (common.read(old)?, common.read(new)?);
            let output = compare::report(&old, &new, common.at, common.top)?;
            (common, output)
        }
    };
    common.put(&output)
}

/// Bytes as options have them.
fn byte_count(text: &str) -> Result<u64, String> {
    let wrong = || "expected a number of bytes, as in 65536 or 8G".to_owned();
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_on_the_command_line() {
        assert_eq!(byte_count("8G"), Ok(8 << 30));
        assert_eq!(byte_count("65536"), Ok(65536));
        for wrong in ["", "G", "8GG", "-1", "1.5G", "99999999999G"] {
            assert!(byte_count(wrong).is_err(), "{wrong}");
        }
    }
}
