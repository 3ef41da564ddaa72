//! `measure [--preload LIBRARY] [--set NAME=VALUE]... -- COMMAND...`: runs a command and prints what it used as
//! one JSON line on standard error.
//!
//! The parent's resident size is where a child's peak starts counting, across exec too: a small parent like
//! this one keeps that out of the figures.

use std::mem::zeroed;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, exit};
use std::time::Instant;

fn seconds(t: libc::timeval) -> f64 {
    t.tv_sec as f64 + t.tv_usec as f64 / 1e6
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut settings = vec![];
    while let Some(flag) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| usage());
        match flag.as_str() {
            "--preload" => settings.push(("LD_PRELOAD".to_string(), value())),
            "--set" => match value().split_once('=') {
                Some((name, text)) => settings.push((name.into(), text.into())),
                None => usage(),
            },
            "--" => break,
            _ => usage(),
        }
    }
    let program = args.next().unwrap_or_else(|| usage());
    let start = Instant::now();
    #[allow(clippy::zombie_processes, reason = "wait4 below waits, and returns the usage as well")]
    let child = Command::new(&program).args(args).envs(settings).spawn().unwrap_or_else(|e| {
        eprintln!("measure: {program}: {e}: is it installed?");
        exit(127)
    });
    let pid = libc::pid_t::try_from(child.id()).expect("a process id");
    let mut status = 0;
    // SAFETY: a rusage is plain integers, for which zero is a value.
    let mut used: libc::rusage = unsafe { zeroed() };
    // SAFETY: pid is our child, not yet waited for; the other two are valid to write to.
    let waited = unsafe { libc::wait4(pid, &mut status, 0, &mut used) };
    assert_eq!(waited, pid, "wait4");
    let wall = start.elapsed().as_secs_f64();
    let status = ExitStatus::from_raw(status);
    let code = status.code().or(status.signal().map(|s| 128 + s)).unwrap_or(-1);
    let (user, sys) = (seconds(used.ru_utime), seconds(used.ru_stime));
    let (peak, faults) = (used.ru_maxrss, used.ru_minflt);
    eprintln!(
        "\n{{\"exit\": {code}, \"wall\": {wall:.4}, \"user\": {user:.4}, \"sys\": {sys:.4}, \"peak_kib\": {peak}, \"faults\": {faults}}}"
    );
}

fn usage() -> ! {
    eprintln!("measure: usage: measure [--preload LIBRARY] [--set NAME=VALUE]... -- COMMAND...");
    exit(2)
}
