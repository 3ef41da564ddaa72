//! Finds the program as execvp(3) would, and tells beforehand where a preload would be silently
//! ignored: a statically linked program, one with raised privileges, one of another machine.
use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::elf;
use crate::failure::Failure;

/// execvp's, where PATH is not set.
const DEFAULT_PATH: &str = "/bin:/usr/bin";
/// A script may name a script as its interpreter; the kernel follows no more than this.
const MAX_SCRIPTS: usize = 5;
const FORCE: &str = "pass --force to run it on its own allocator";

/// The file that `name` means.
pub(crate) fn resolve(name: &OsStr) -> Result<PathBuf, Failure> {
    if name.is_empty() {
        return Err(Failure::not_found("''", "no such program", "name a program"));
    }
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match runnable(&path) {
            Ok(()) => Ok(path),
            Err(error) => Err(unusable(&path, &error)),
        };
    }
    search(name, &env::var_os("PATH").unwrap_or_else(|| OsString::from(DEFAULT_PATH)))
}

/// The first runnable file in `list`; one that is not runnable is passed over, but named when no
/// other is found.
fn search(name: &OsStr, list: &OsStr) -> Result<PathBuf, Failure> {
    let mut refused = None;
    for folder in env::split_paths(list) {
        let path = if folder.as_os_str().is_empty() {
            Path::new(".").join(name)
        } else {
            folder.join(name)
        };
        match runnable(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                refused.get_or_insert(path);
            }
            Err(_) => {}
        }
    }
    Err(match refused {
        Some(path) => unusable(&path, &io::ErrorKind::PermissionDenied.into()),
        None => Failure::not_found(
            name.display(),
            "not found in PATH",
            "check the name, or give a path with a slash",
        ),
    })
}

/// Whether `path` is a file that this user may run.
fn runnable(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let path = c_string(path);
    // SAFETY: `path` is a string ended by a zero byte, alive for the call.
    if unsafe { libc::access(path.as_ptr(), libc::X_OK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The failure to start `path` that `error` means, before or by exec.
pub(crate) fn unusable(path: &Path, error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound if path.exists() => Failure::not_found(
            path.display(),
            "its interpreter or loader was not found",
            "check the file's first line, or 'readelf -l' for its loader",
        ),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Failure::not_found(path.display(), "no such file", "check the path")
        }
        io::ErrorKind::PermissionDenied if path.is_dir() => {
            Failure::cannot_run(path.display(), "is a directory", "name a program")
        }
        io::ErrorKind::PermissionDenied => Failure::cannot_run(
            path.display(),
            "not executable",
            "check its permissions ('chmod +x')",
        ),
        _ => Failure::cannot_run(path.display(), error, "check that it runs without thermalloc"),
    }
}

/// Fails where the loader would leave the preload out, so that nobody measures the wrong allocator.
pub(crate) fn check_preloadable(path: &Path, library: elf::Header) -> Result<(), Failure> {
    let path = interpreter_of(path);
    // What cannot be read cannot be judged: exec will tell.
    let Ok(Some(header)) = elf::read(&path) else {
        return Ok(());
    };
    let refuse = |why, hint: &str| Err(Failure::cannot_run(path.display(), why, hint));
    if header.platform != library.platform {
        let why = "is for another machine type than the library, which the loader would leave out";
        return refuse(why, &format!("use a library built for it, or {FORCE}"));
    }
    if !header.has_loader {
        let why = "is statically linked, so a preload cannot reach its malloc";
        return refuse(why, &format!("link thermalloc into it, or {FORCE}"));
    }
    if raises_privileges(&path) {
        let why = "runs with raised privileges (set-user-ID, set-group-ID or file capabilities), \
                   so the loader ignores a preload";
        return refuse(why, &format!("run it as the user it changes to, or {FORCE}"));
    }
    Ok(())
}

/// The binary that the kernel starts: `path`, or what the first line of a script names.
fn interpreter_of(path: &Path) -> PathBuf {
    let mut path = path.to_path_buf();
    for _ in 0..MAX_SCRIPTS {
        let mut start = Vec::new();
        let read = File::open(&path).and_then(|file| file.take(256).read_to_end(&mut start));
        match (read, interpreter(&start)) {
            (Ok(_), Some(next)) => path = next,
            _ => break,
        }
    }
    path
}

/// The interpreter in a script's first bytes.
fn interpreter(start: &[u8]) -> Option<PathBuf> {
    let line = start.strip_prefix(b"#!")?;
    let mut words = line.split(|&byte| byte == b'\n').next()?.split(|byte| b" \t".contains(byte));
    let word = words.find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(word)))
}

/// Whether exec of `path` would set AT_SECURE for this user.
fn raises_privileges(path: &Path) -> bool {
    let Ok(file) = fs::metadata(path) else {
        return false;
    };
    // SAFETY: has no precondition.
    let uid = unsafe { libc::getuid() };
    // SAFETY: has no precondition.
    let gid = unsafe { libc::getgid() };
    let changes_user = file.mode() & libc::S_ISUID != 0 && file.uid() != uid;
    // Without the group's execute bit the flag means something else (mandatory locking).
    let set_gid = libc::S_ISGID | libc::S_IXGRP;
    let changes_group = file.mode() & set_gid == set_gid && file.gid() != gid;
    changes_user || changes_group || (uid != 0 && has_capabilities(path))
}

fn has_capabilities(path: &Path) -> bool {
    let path = c_string(path);
    let name = c"security.capability";
    // SAFETY: both strings end in a zero byte and are alive; with a size of 0 nothing is written.
    unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) > 0 }
}

/// Paths come from the command line, PATH or a file's first line cut at a blank; one with a zero
/// byte in it names nothing, and is made to.
fn c_string(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_lines() {
        let of = |text: &str| interpreter(text.as_bytes());
        assert_eq!(of("#!/bin/sh\necho"), Some(PathBuf::from("/bin/sh")));
        assert_eq!(of("#! /usr/bin/env -S python3\n"), Some(PathBuf::from("/usr/bin/env")));
        assert_eq!(of("#!\n/bin/sh"), None);
        assert_eq!(of("/bin/sh"), None);
    }

    #[test]
    fn path_order_and_codes() {
        let found = search(OsStr::new("sh"), OsStr::new("/nonexistent:/bin:/usr/bin")).unwrap();
        assert_eq!(found, Path::new("/bin/sh"));
        let missing = search(OsStr::new("no-such-program"), OsStr::new("/bin")).unwrap_err();
        assert_eq!(missing.code(), 127);
        let folder = search(OsStr::new("bin"), OsStr::new("/usr")).unwrap_err();
        assert_eq!(folder.code(), 126);
    }
}
