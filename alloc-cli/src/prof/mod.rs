//! `thermalloc prof`: profiles of programs, made, told and translated.
//!
//! Invariant: a report's figures are sums over recorded blocks, each with the weight that it was given when
//! it was recorded; nothing is guessed that the file does not say, and what it lacks is noted.
mod analysis;
mod classes;
mod convert;
mod flame;
mod heap_v2;
mod leaks;
mod pprof;
mod profile;
mod report;
mod rss;
mod run;
mod symbols;
mod table;

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::Value;

use self::analysis::{Analysis, At};
use self::profile::Profile;
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
    /// Who holds memory: components, operators and scopes, call sites
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

    /// Rules for components, before the built-in ones
    #[arg(long, value_name = "PATH")]
    classes: Option<PathBuf>,

    /// Look up files and lines too, which may take long
    #[arg(long)]
    lines: bool,

    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
}

impl Common {
    fn first(&self) -> &Path {
        // clap sees to it that there is one.
        self.files.first().map_or(Path::new(""), PathBuf::as_path)
    }

    fn analysis(&self) -> Result<Analysis, Failure> {
        Analysis::read(self.first(), self.classes.as_deref(), self.lines)
    }

    /// The last file, and the one before it.
    fn last_two(&self) -> Result<(Analysis, Option<Profile>), Failure> {
        let read = |path: &PathBuf| Analysis::read(path, self.classes.as_deref(), self.lines);
        match self.files.as_slice() {
            [.., before, last] => Ok((read(last)?, Some(Profile::read(before)?))),
            [only] => Ok((read(only)?, None)),
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
        Some(path) => fs::write(path, bytes)
            .map_err(|why| Failure::cannot_run(path.display(), why, hint)),
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
            let output = report::report(&common.analysis()?, common.at, common.top)?;
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
    };
    common.put(&output)
}
