//! Finds libthermalloc.so: what the caller names, then the places that a build or an install puts
//! it, then the system loader's own index.
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{self, Path, PathBuf};

use crate::elf;
use crate::failure::Failure;

const NAME: &str = "libthermalloc.so";
const VARIABLE: &str = "THERMALLOC_LIB";
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// A library that the loader will accept.
#[derive(Debug)]
pub(crate) struct Library {
    /// Absolute: the program may change its directory and start others.
    pub(crate) path: PathBuf,
    pub(crate) header: elf::Header,
}

/// The library to preload: `named` by `--lib`, else by the environment, else found.
pub(crate) fn find(named: Option<&Path>) -> Result<Library, Failure> {
    if let Some(path) = named {
        return open(path, "--lib");
    }
    if let Some(path) = env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        return open(Path::new(&path), VARIABLE);
    }
    let near = env::current_exe().map(|exe| near(&exe)).unwrap_or_default();
    let indexed = fs::read(LOADER_CACHE).map(|cache| indexed(&cache)).unwrap_or_default();
    match near.iter().chain(&indexed).find(|path| path.is_file()) {
        Some(path) => open(path, "--lib"),
        None => Err(not_found(&near)),
    }
}

/// Where a build or an install puts the library, seen from the tool's own file.
fn near(exe: &Path) -> Vec<PathBuf> {
    let Some(folder) = exe.parent() else {
        return Vec::new();
    };
    let mut places = vec![folder.join(NAME)];
    if let Some(prefix) = folder.parent() {
        places.push(prefix.join("lib").join(NAME));
        // A tool built by a plain `cargo build` runs on the release library of its workspace.
        if folder.ends_with("debug") {
            places.push(prefix.join("release").join(NAME));
        }
    }
    places
}

/// Full paths in the loader's index. The index is a table of strings, each ended by a zero byte,
/// so no knowledge of its layout is needed.
fn indexed(cache: &[u8]) -> Vec<PathBuf> {
    cache
        .split(|&byte| byte == 0)
        .filter_map(|string| {
            let start = string.iter().position(|&byte| byte == b'/')?;
            let path = Path::new(OsStr::from_bytes(&string[start..]));
            let name = path.file_name()?.to_str()?;
            let version = name.strip_prefix(NAME)?;
            (version.is_empty() || version.starts_with('.')).then(|| path.to_path_buf())
        })
        .collect()
}

fn open(path: &Path, source: &str) -> Result<Library, Failure> {
    let hint = format!("give {source} the path of {NAME}");
    let path =
        path::absolute(path).map_err(|error| Failure::not_found(path.display(), error, &hint))?;
    let header = elf::read(&path).map_err(|error| {
        let why = if error.kind() == std::io::ErrorKind::NotFound {
            "no such file".to_owned()
        } else {
            error.to_string()
        };
        Failure::not_found(path.display(), why, &hint)
    })?;
    let Some(header) = header.filter(|header| header.shared) else {
        return Err(Failure::cannot_run(path.display(), "not a shared library", hint));
    };
    // LD_PRELOAD is a list, separated by either, with no way to quote.
    if path.as_os_str().as_bytes().iter().any(|byte| b": \t\n".contains(byte)) {
        return Err(Failure::cannot_run(
            path.display(),
            "LD_PRELOAD cannot name a path with a colon or white space in it",
            "move the library or make a link to it",
        ));
    }
    Ok(Library { path, header })
}

fn not_found(tried: &[PathBuf]) -> Failure {
    let folders: Vec<String> = tried
        .iter()
        .filter_map(|path| path.parent())
        .map(|folder| folder.display().to_string())
        .collect();
    Failure::not_found(
        NAME,
        format!("not in {}, nor known to ldconfig", folders.join(", ")),
        "build it by 'cargo build --release -p thermalloc-capi', or name it by --lib PATH",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debug_tool_uses_the_release_library() {
        let places = near(Path::new("/w/target/debug/thermalloc"));
        assert_eq!(places[0], Path::new("/w/target/debug/libthermalloc.so"));
        assert!(places.contains(&PathBuf::from("/w/target/release/libthermalloc.so")));
        let installed = near(Path::new("/usr/local/bin/thermalloc"));
        assert_eq!(installed.len(), 2);
        assert_eq!(installed[1], Path::new("/usr/local/lib/libthermalloc.so"));
    }

    #[test]
    fn the_index_yields_full_paths_of_this_library_only() {
        let cache =
            b"glibc-ld.so.cache1.1\0\x07\x01/usr/lib/libthermalloc.so.0\0libthermalloc.so\0\
                      /usr/lib/libthermalloc.so\0/usr/lib/libthermalloc.sox\0/usr/lib/libc.so.6\0";
        assert_eq!(
            indexed(cache),
            [
                PathBuf::from("/usr/lib/libthermalloc.so.0"),
                PathBuf::from("/usr/lib/libthermalloc.so")
            ]
        );
    }
}
