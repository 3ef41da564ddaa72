//! Why the program was not started: the line for stderr and the exit code.
use std::fmt;

/// An error before the program started.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    what: String,
    why: String,
    hint: String,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Usage,
    NotFound,
    CannotRun,
}

impl Failure {
    /// The command line is wrong (exit code 2).
    pub(crate) fn usage(why: &str) -> Self {
        let hint = "see 'thermalloc run --help'";
        Self::new(Kind::Usage, "usage", why, hint)
    }

    /// The program or the library is not there (exit code 127).
    pub(crate) fn not_found(
        what: impl fmt::Display,
        why: impl fmt::Display,
        hint: impl fmt::Display,
    ) -> Self {
        Self::new(Kind::NotFound, what, why, hint)
    }

    /// It is there but cannot be run as asked (exit code 126).
    pub(crate) fn cannot_run(
        what: impl fmt::Display,
        why: impl fmt::Display,
        hint: impl fmt::Display,
    ) -> Self {
        Self::new(Kind::CannotRun, what, why, hint)
    }

    fn new(
        kind: Kind,
        what: impl fmt::Display,
        why: impl fmt::Display,
        hint: impl fmt::Display,
    ) -> Self {
        Self { kind, what: what.to_string(), why: why.to_string(), hint: hint.to_string() }
    }

    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        match self.kind {
            Kind::Usage => 2,
            Kind::CannotRun => 126,
            Kind::NotFound => 127,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thermalloc: {}: {}: {}", self.what, self.why, self.hint)
    }
}
