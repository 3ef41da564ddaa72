//! `thermalloc run`: preload and options into the environment, then exec(3), so that the process,
//! its exit code and its signals are the program's own.
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::failure::Failure;
use crate::{library, program, signals};

const PRELOAD: &str = "LD_PRELOAD";
const CONF: &str = "THERMALLOC_CONF";

/// Run a program on thermalloc.
///
/// Finds libthermalloc.so, puts it first in LD_PRELOAD, puts the options given here behind
/// those already in THERMALLOC_CONF, and becomes the program: its output, exit code and
/// signals are its own. Programs that it starts run on thermalloc too.
#[derive(Args, Debug)]
#[command(
    verbatim_doc_comment,
    override_usage = "thermalloc run [OPTIONS] [--] PROGRAM [ARGS]...",
    after_long_help = "\
Exit codes of an error before the program starts, one line on stderr:
  2    wrong usage
  126  the program or the library is there but cannot be used
  127  the program or the library was not found

Examples:
  thermalloc run redis-server /etc/redis/redis.conf
  thermalloc run --hot-window-ms 10000 -- python3 train.py --epochs 3"
)]
pub(crate) struct Options {
    /// Library to preload [default: beside this tool, in ../lib, then where ldconfig finds it]
    #[arg(long = "lib", value_name = "PATH")]
    library: Option<PathBuf>,

    /// Keep a page that was in use within the last N milliseconds
    #[arg(long, value_name = "N")]
    hot_window_ms: Option<u64>,

    /// Spread giving back what lies beyond that over N milliseconds: 0 gives back at once, -1 never
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..))]
    dirty_decay_ms: Option<i64>,

    /// Hold at most N bytes in the cache of each CPU; N may end in K, M or G
    #[arg(long, value_name = "N", value_parser = byte_count)]
    cpu_cache_bytes: Option<String>,

    /// Start no thread that gives memory back while the program is quiet
    #[arg(long)]
    no_background_thread: bool,

    /// Set any option by its name (docs/options.md); may be repeated, the last one counts
    #[arg(long, value_name = "NAME:VALUE", value_parser = name_and_value)]
    conf: Vec<String>,

    /// Run also a program that a preload cannot reach (static, or with raised privileges)
    #[arg(long)]
    force: bool,

    /// Program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Becomes the program; comes back only where that failed.
pub(crate) fn run(options: Options) -> Failure {
    run_with(options, &[], None)
}

/// As [`run`], with settings that those of the command line can still change, and with a library from the same
/// folder.
pub(crate) fn run_with(options: Options, settings: &[String], beside: Option<&str>) -> Failure {
    match prepare(&options, settings, beside) {
        Ok((path, mut command)) => program::unusable(&path, &signals::exec(&mut command)),
        Err(failure) => failure,
    }
}

fn prepare(
    options: &Options,
    settings: &[String],
    beside: Option<&str>,
) -> Result<(PathBuf, Command), Failure> {
    let Some((name, args)) = options.command.split_first() else {
        return Err(Failure::usage("no program"));
    };
    let library = library::find(options.library.as_deref())?;
    let path = program::resolve(name)?;
    if !options.force {
        program::check_preloadable(&path, library.header)?;
    }
    let mut command = Command::new(&path);
    command.arg0(name).args(args);
    let mut value = env::var_os(PRELOAD);
    if let Some(name) = beside {
        let path = library.path.with_file_name(name);
        value = Some(preload(&library::find(Some(&path))?.path, value));
    }
    command.env(PRELOAD, preload(&library.path, value));
    let settings = [settings, &options.settings()].concat();
    if let Some(conf) = conf(env::var_os(CONF), &settings) {
        command.env(CONF, conf);
    }
    Ok((path, command))
}

impl Options {
    /// The flags in the syntax of THERMALLOC_CONF, those of `--conf` last.
    fn settings(&self) -> Vec<String> {
        let mut settings = Vec::new();
        let mut set = |name: &str, value: Option<String>| {
            settings.extend(value.map(|value| format!("{name}:{value}")));
        };
        set("hot_window_ms", self.hot_window_ms.map(|n| n.to_string()));
        set("dirty_decay_ms", self.dirty_decay_ms.map(|n| n.to_string()));
        set("cpu_cache_bytes", self.cpu_cache_bytes.clone());
        set("background_thread", self.no_background_thread.then(|| "false".to_owned()));
        settings.extend(self.conf.iter().cloned());
        settings
    }
}

/// `library` first, so that it wins, then what was there.
fn preload(library: &Path, inherited: Option<OsString>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    let inherited = inherited.unwrap_or_default();
    let kept = inherited
        .as_bytes()
        .split(|byte| b": \t\n".contains(byte))
        .filter(|entry| !entry.is_empty() && *entry != library.as_os_str().as_bytes());
    for entry in kept {
        value.push(":");
        value.push(OsStr::from_bytes(entry));
    }
    value
}

/// The inherited settings, then ours: the library lets the last one count.
fn conf(inherited: Option<OsString>, settings: &[String]) -> Option<OsString> {
    if settings.is_empty() {
        return None;
    }
    let mut value = inherited.unwrap_or_default();
    if !value.is_empty() && !value.as_bytes().ends_with(b",") {
        value.push(",");
    }
    value.push(settings.join(","));
    Some(value)
}

fn byte_count(text: &str) -> Result<String, String> {
    let number = text.strip_suffix(['K', 'M', 'G']).unwrap_or(text);
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("expected a number of bytes, as in 65536 or 8M".to_owned());
    }
    Ok(text.to_owned())
}

fn name_and_value(text: &str) -> Result<String, String> {
    let well_formed = match text.split_once(':') {
        Some((name, value)) => {
            let plain = |c: char| c.is_ascii_alphanumeric() || "_.".contains(c);
            !name.is_empty() && name.chars().all(plain) && !value.is_empty()
        }
        None => false,
    };
    if !well_formed {
        return Err("expected NAME:VALUE, as in hot_window_ms:5000".to_owned());
    }
    if text.contains(',') {
        return Err("a comma separates options: give --conf once for each".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_comes_first_and_once() {
        let ours = Path::new("/l/libthermalloc.so");
        let with = |old: &str| preload(ours, Some(old.into())).into_string().unwrap();
        assert_eq!(preload(ours, None), "/l/libthermalloc.so");
        assert_eq!(with(""), "/l/libthermalloc.so");
        assert_eq!(with("/a.so /b.so:c.so"), "/l/libthermalloc.so:/a.so:/b.so:c.so");
        assert_eq!(with("/a.so:/l/libthermalloc.so"), "/l/libthermalloc.so:/a.so");
    }

    #[test]
    fn settings_go_behind_the_inherited_ones() {
        let with = |old: &str, new: &[&str]| {
            let new: Vec<String> = new.iter().map(|&text| text.to_owned()).collect();
            conf(Some(old.into()), &new)
        };
        assert_eq!(with("a:1", &[]), None);
        assert_eq!(with("", &["b:2"]).unwrap(), "b:2");
        assert_eq!(with("a:1", &["b:2", "c:3"]).unwrap(), "a:1,b:2,c:3");
        assert_eq!(with("a:1,", &["b:2"]).unwrap(), "a:1,b:2");
    }

    #[test]
    fn byte_counts() {
        assert_eq!(byte_count("65536").unwrap(), "65536");
        assert_eq!(byte_count("8M").unwrap(), "8M");
        for wrong in ["", "M", "-1", "8MM", "8 M", "1.5G"] {
            assert!(byte_count(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn conf_values_are_checked_for_form_only() {
        assert!(name_and_value("stats:true").is_ok());
        assert!(name_and_value("prof_prefix:/tmp/a:b").is_ok());
        for wrong in ["", "stats", ":true", "stats:", "a b:1", "a:1,b:2"] {
            assert!(name_and_value(wrong).is_err(), "{wrong:?}");
        }
    }
}
