//! Traces from files: those that a pool recorded (`record`, docs/cuda.md), and those of real programs in
//! `traces/`. A line `once` or `round` says of which part the events after it are; without them all is
//! one round.

use crate::traces::{Step, Trace};
use std::collections::HashSet;
use std::io::{Error, Read, Result};
use std::path::Path;
use std::process::{Command, Stdio};

/// The text of a file; one that ends in `.gz` goes through gzip.
fn text(path: &Path) -> Result<String> {
    if path.extension().is_none_or(|ext| ext != "gz") {
        return std::fs::read_to_string(path);
    }
    let mut gzip = Command::new("gzip").arg("-dc").arg(path).stdout(Stdio::piped()).spawn()?;
    let mut text = String::new();
    if let Some(out) = &mut gzip.stdout {
        out.read_to_string(&mut text)?;
    }
    if gzip.wait()?.success() { Ok(text) } else { Err(Error::other("gzip failed")) }
}

/// An event of a line; nothing where it is none.
fn step(line: &str) -> Option<Step> {
    let mut words = line.split(' ');
    let kind = words.next()?;
    let id = words.next()?.parse().ok()?;
    let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
    Some(match kind {
        "a" => Step::Alloc { id, bytes: number()?.max(1), stream: number()? as usize },
        "f" => Step::Free { id },
        "u" => Step::Use { id, stream: number()? as usize },
        "e" => Step::End { id, stream: number()? as usize },
        _ => return None,
    })
}

/// Leaves of a round what can be played again: what it allocates it frees.
fn closed(round: Vec<Step>) -> Vec<Step> {
    let mut live = HashSet::new();
    let mut steps = Vec::with_capacity(round.len());
    for step in round {
        let keep = match step {
            Step::Alloc { id, .. } => live.insert(id),
            Step::Free { id } => live.remove(&id),
            Step::Use { id, .. } | Step::End { id, .. } => live.contains(&id),
            Step::Kernel { .. } => true,
        };
        if keep {
            steps.push(step);
        }
    }
    let mut left: Vec<usize> = live.into_iter().collect();
    left.sort_unstable();
    steps.extend(left.into_iter().map(|id| Step::Free { id }));
    steps
}

/// The trace in a file.
pub(crate) fn read(path: &Path) -> Result<Trace> {
    let wrong = |line: &str| Error::other(format!("{}: not an event: {line}", path.display()));
    let text = text(path)?;
    let mut lines = text.lines();
    if lines.next() != Some("thermalloc-cuda-trace 1") {
        return Err(Error::other(format!("{}: not a trace", path.display())));
    }
    let (mut once, mut round, mut in_round) = (Vec::new(), Vec::new(), true);
    for line in lines {
        match line {
            "once" => in_round = false,
            "round" => in_round = true,
            _ => {
                let step = step(line).ok_or_else(|| wrong(line))?;
                if in_round { round.push(step) } else { once.push(step) }
            }
        }
    }
    let streams = once.iter().chain(&round).map(|step| match *step {
        Step::Alloc { stream, .. } | Step::Use { stream, .. } | Step::End { stream, .. } => {
            stream + 1
        }
        _ => 1,
    });
    let name = path.file_stem().unwrap_or_default().to_string_lossy().replace('_', ", ");
    Ok(Trace { name, streams: streams.max().unwrap_or(1), once, round: closed(round) })
}

/// Those in `traces/`.
pub(crate) fn all() -> Result<Vec<Trace>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
    let mut files: Vec<_> = std::fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ext| ext == "gz"))
        .collect();
    files.sort();
    files.iter().map(|path| read(path)).collect()
}
