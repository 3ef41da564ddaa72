//! `prof run`: as `thermalloc run`, with the profiler's options.
use std::path::PathBuf;

use clap::Args;

use crate::failure::Failure;
use crate::run;

/// Run a program on thermalloc and write a profile of it.
///
/// Becomes the program, as 'thermalloc run' does. A log of its memory goes to NAME.PID.thlog: every event
/// of recorded blocks, a dump now and then while it grows, and one at the end. Programs that it starts
/// are not profiled, unless asked; its forks are.
#[derive(Args, Debug)]
#[group(skip)]
#[command(
    verbatim_doc_comment,
    override_usage = "thermalloc prof run [OPTIONS] [--] PROGRAM [ARGS]..."
)]
pub(crate) struct Options {
    /// What names of files begin with
    #[arg(short = 'o', long, value_name = "NAME", default_value = "thermalloc", value_parser = no_comma)]
    output: String,

    /// Record every block, not a sample: slow, and of some GB for a framework. There are no dumps but that at
    /// the end, since the events say all
    #[arg(long)]
    exact: bool,

    /// Mean bytes between samples, as a power of 2 [default: 19]. As many samples a second as that makes,
    /// where without it there are at most 2000
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=62))]
    lg_sample: Option<u32>,

    /// Write dumps only, no events: for processes that run for days
    #[arg(long)]
    no_events: bool,

    /// Write a dump each time that 2^N more bytes were allocated
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(10..=62))]
    lg_interval: Option<u32>,

    /// Profile the programs that it starts too
    #[arg(long)]
    children: bool,

    /// Threads inherit the scope that they are created in (by libthermalloc_threads.so, beside libthermalloc.so)
    #[arg(long)]
    inherit_scopes: bool,

    #[command(flatten)]
    run: run::Options,
}

fn no_comma(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(',') {
        return Err("a comma separates options".to_owned());
    }
    Ok(text.to_owned())
}

/// Becomes the program; comes back only where that failed.
pub(crate) fn run(options: Options) -> Failure {
    let name = match absolute(&options.output) {
        Ok(name) => name,
        Err(failure) => return failure,
    };
    let settings = options.settings(&name);
    let beside = options.inherit_scopes.then_some("libthermalloc_threads.so");
    run::run_with(options.run, &settings, beside)
}

/// The program may change its directory.
fn absolute(name: &str) -> Result<String, Failure> {
    let hint = "name another by -o";
    let path: PathBuf =
        std::path::absolute(name).map_err(|why| Failure::cannot_run(name, why, hint))?;
    let text = path.into_os_string().into_string();
    let text = text.map_err(|_| Failure::cannot_run(name, "not in UTF-8", hint))?;
    if text.contains(',') {
        return Err(Failure::cannot_run(text, "has a comma, which separates options", hint));
    }
    Ok(text)
}

impl Options {
    fn settings(&self, name: &str) -> Vec<String> {
        let mut settings = vec!["prof:true".to_owned(), format!("prof_prefix:{name}")];
        if !self.children {
            settings.push(format!("prof_pid:{}", std::process::id()));
        }
        if self.no_events {
            settings.push("prof_final:true".to_owned());
        } else {
            settings.push(format!("prof_events:{name}.%p.thlog"));
        }
        if !self.exact || self.no_events {
            settings.push("prof_gdump:true".to_owned());
        }
        if self.exact {
            settings.extend(["lg_prof_sample:0".to_owned(), "prof_budget:0".to_owned()]);
        }
        if let Some(lg) = self.lg_sample {
            settings.extend([format!("lg_prof_sample:{lg}"), "prof_budget:0".to_owned()]);
        }
        settings.extend(self.lg_interval.map(|lg| format!("lg_prof_interval:{lg}")));
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_absolute_and_hold_no_comma() {
        assert!(absolute("a").unwrap().starts_with('/'));
        assert_eq!(absolute("/x/y").unwrap(), "/x/y");
        assert!(no_comma("a,b").is_err() && no_comma("").is_err());
    }
}
