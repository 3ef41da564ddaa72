//! Traces, as text. The first line is `thermalloc-trace 1`; then one event a line, in order of time,
//! times in microseconds from the start:
//!
//! ```text
//! a TIME ID BYTES [PERCENT]   a block is allocated, and PERCENT of it (100) is touched
//! r TIME ID BYTES             it gets another length
//! f TIME ID                   it is freed; its id may be used again
//! d COUNT                     so many events were lost here, as the recorder had no room
//! e TIME                      the trace lasts until then
//! # anything                  a remark
//! ```
//!
//! An id is any number that no other live block has. What the library records (option `trace_file`)
//! is of this form, with a block's first page as its id.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, Write};

const HEADER: &str = "thermalloc-trace 1";

/// What happens to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// It is allocated.
    Alloc {
        /// Its length.
        bytes: usize,
        /// How much of it the program touches.
        percent: u8,
    },
    /// It gets another length, where it is or elsewhere.
    Resize {
        /// The new length.
        bytes: usize,
    },
    /// It is freed.
    Free,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, microseconds.
    pub at_us: u64,
    /// Whose.
    pub id: u64,
    /// What.
    pub what: What,
}

/// A program's allocations over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// In order of time.
    pub events: Vec<Event>,
    /// When it ends, microseconds.
    pub end_us: u64,
    /// Events that the recorder lost.
    pub dropped: u64,
}

/// What is wrong with a trace, and in which line.
#[derive(Debug)]
pub enum Error {
    /// The file can't be read.
    Io(io::Error),
    /// It is not a trace.
    Form {
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        what: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Form { line, what } => write!(f, "line {line}: {what}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Figures of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Events of each kind.
    pub allocs: u64,
    /// As above.
    pub frees: u64,
    /// As above.
    pub resizes: u64,
    /// Bytes allocated in all.
    pub bytes: u64,
    /// The most that was live at one time, bytes.
    pub peak_bytes: u64,
    /// What is live at the end: blocks, and their bytes.
    pub left: (u64, u64),
    /// The largest block, bytes.
    pub largest_bytes: u64,
}

impl Trace {
    /// Adds an allocation that is touched whole.
    pub fn alloc(&mut self, at_us: u64, id: u64, bytes: usize) {
        self.events.push(Event { at_us, id, what: What::Alloc { bytes, percent: 100 } });
    }

    /// Adds a free.
    pub fn free(&mut self, at_us: u64, id: u64) {
        self.events.push(Event { at_us, id, what: What::Free });
    }

    /// Brings the events into order of time; those of one time stay in theirs.
    pub fn sort(&mut self) {
        self.events.sort_by_key(|event| event.at_us);
    }

    /// Reads a trace. After a gap of lost events, blocks whose allocation was lost are left out, and
    /// one whose id comes again was freed meanwhile.
    ///
    /// # Errors
    /// Where it can't be read or is no trace.
    pub fn read(from: impl BufRead) -> Result<Self, Error> {
        let mut reader = Reader::default();
        for (i, line) in from.lines().enumerate() {
            reader.line(i, line?.trim_end()).map_err(|what| Error::Form { line: i + 1, what })?;
        }
        if !reader.begun {
            return Err(Error::Form { line: 1, what: "a trace starts with thermalloc-trace 1" });
        }
        Ok(reader.trace)
    }

    /// Writes the trace.
    ///
    /// # Errors
    /// Where that fails.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        writeln!(to, "{HEADER}")?;
        for &Event { at_us, id, what } in &self.events {
            match what {
                What::Alloc { bytes, percent: 100 } => writeln!(to, "a {at_us} {id} {bytes}")?,
                What::Alloc { bytes, percent } => writeln!(to, "a {at_us} {id} {bytes} {percent}")?,
                What::Resize { bytes } => writeln!(to, "r {at_us} {id} {bytes}")?,
                What::Free => writeln!(to, "f {at_us} {id}")?,
            }
        }
        if self.dropped > 0 {
            writeln!(to, "d {}", self.dropped)?;
        }
        writeln!(to, "e {}", self.end_us)
    }

    /// Its figures.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let mut s = Summary::default();
        let (mut live, mut live_bytes) = (HashMap::new(), 0);
        for event in &self.events {
            let bytes = match event.what {
                What::Alloc { bytes, .. } => {
                    s.allocs += 1;
                    s.bytes += bytes as u64;
                    bytes as u64
                }
                What::Resize { bytes } => {
                    s.resizes += 1;
                    bytes as u64
                }
                What::Free => {
                    s.frees += 1;
                    0
                }
            };
            let old = match event.what {
                What::Free => live.remove(&event.id),
                _ => live.insert(event.id, bytes),
            };
            live_bytes = live_bytes + bytes - old.unwrap_or(0);
            s.peak_bytes = s.peak_bytes.max(live_bytes);
            s.largest_bytes = s.largest_bytes.max(bytes);
        }
        s.left = (live.len() as u64, live_bytes);
        s
    }
}

#[derive(Default)]
struct Reader {
    trace: Trace,
    begun: bool,
    live: std::collections::HashSet<u64>,
}

impl Reader {
    fn line(&mut self, index: usize, line: &str) -> Result<(), &'static str> {
        if index == 0 {
            self.begun = line == HEADER;
            return if self.begun { Ok(()) } else { Err("a trace starts with thermalloc-trace 1") };
        }
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        let mut words = line.split(' ');
        let letter = words.next().unwrap_or_default();
        let mut number = || -> Result<Option<u64>, &'static str> {
            words.next().map(|word| word.parse().map_err(|_| "not a number")).transpose()
        };
        let first = number()?.ok_or("a number is missing")?;
        if letter == "d" {
            self.trace.dropped += first;
        } else if letter == "e" {
            self.trace.end_us = self.trace.end_us.max(first);
        } else {
            let id = number()?.ok_or("an id is missing")?;
            let what = if letter == "f" {
                What::Free
            } else {
                let bytes = number()?.ok_or("a length is missing")?;
                let bytes = usize::try_from(bytes).map_err(|_| "too long a block")?;
                match letter {
                    "a" => {
                        let percent = u8::try_from(number()?.unwrap_or(100));
                        let percent = percent.ok().filter(|&p| p <= 100);
                        What::Alloc { bytes, percent: percent.ok_or("more than 100 per cent")? }
                    }
                    "r" => What::Resize { bytes },
                    _ => return Err("an unknown kind of event"),
                }
            };
            self.event(Event { at_us: first, id, what })?;
        }
        if number()?.is_some() { Err("too many numbers") } else { Ok(()) }
    }

    fn event(&mut self, event: Event) -> Result<(), &'static str> {
        if self.trace.events.last().is_some_and(|last| last.at_us > event.at_us) {
            return Err("the time goes back");
        }
        let lost = self.trace.dropped > 0;
        match event.what {
            What::Alloc { .. } if !self.live.insert(event.id) => {
                if !lost {
                    return Err("a block of this id is live");
                }
                self.trace.free(event.at_us, event.id);
            }
            What::Resize { .. } if !self.live.contains(&event.id) => {
                return if lost { Ok(()) } else { Err("no block of this id is live") };
            }
            What::Free if !self.live.remove(&event.id) => {
                return if lost { Ok(()) } else { Err("no block of this id is live") };
            }
            _ => {}
        }
        self.trace.end_us = self.trace.end_us.max(event.at_us);
        self.trace.events.push(event);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Trace, String> {
        Trace::read(text.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_written_reads_back() {
        let mut trace = Trace { end_us: 500, ..Trace::default() };
        trace.alloc(1, 7, 4096);
        trace.events.push(Event { at_us: 2, id: 8, what: What::Alloc { bytes: 9, percent: 50 } });
        trace.events.push(Event { at_us: 2, id: 7, what: What::Resize { bytes: 8192 } });
        trace.free(3, 7);
        trace.alloc(4, 7, 1);
        let mut text = Vec::new();
        trace.write(&mut text).unwrap();
        assert_eq!(Trace::read(text.as_slice()).unwrap(), trace);
        let s = trace.summary();
        assert_eq!((s.allocs, s.frees, s.resizes), (3, 1, 1));
        assert_eq!((s.bytes, s.peak_bytes, s.left), (4106, 8201, (2, 10)));
    }

    #[test]
    fn nonsense_is_refused_with_its_line() {
        for (text, expected) in [
            ("", "line 1: a trace starts with thermalloc-trace 1"),
            ("thermalloc-trace 2\n", "line 1: a trace starts with thermalloc-trace 1"),
            ("a 1 2 3", "line 1: a trace starts with thermalloc-trace 1"),
            ("thermalloc-trace 1\n\n# x\nq 1 2 3", "line 4: an unknown kind of event"),
            ("thermalloc-trace 1\na 1 2", "line 2: a length is missing"),
            ("thermalloc-trace 1\na 1", "line 2: an id is missing"),
            ("thermalloc-trace 1\na", "line 2: a number is missing"),
            ("thermalloc-trace 1\na 1 2 -3", "line 2: not a number"),
            ("thermalloc-trace 1\na 1 2 3 101", "line 2: more than 100 per cent"),
            ("thermalloc-trace 1\nf 1 2", "line 2: no block of this id is live"),
            ("thermalloc-trace 1\nr 1 2 3", "line 2: no block of this id is live"),
            ("thermalloc-trace 1\na 1 2 3\na 2 2 3", "line 3: a block of this id is live"),
            ("thermalloc-trace 1\na 2 2 3\nf 1 2", "line 3: the time goes back"),
            ("thermalloc-trace 1\na 2 2 3\nf 3 2 9", "line 3: too many numbers"),
        ] {
            assert_eq!(read(text), Err(expected.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn a_gap_leaves_a_trace_that_can_be_replayed() {
        let trace =
            read("thermalloc-trace 1\na 1 2 3\nd 5\nf 2 9\nr 2 9 1\na 3 2 4\nf 4 2\n").unwrap();
        assert_eq!(trace.dropped, 5);
        let s = trace.summary();
        assert_eq!((s.allocs, s.frees, s.left), (2, 2, (0, 0)));
    }
}
