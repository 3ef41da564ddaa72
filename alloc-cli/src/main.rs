//! `thermalloc`: runs a program on the thermalloc allocator.
//!
//! The tool prints nothing of its own once the program has started. Before that, an error is one
//! line on stderr, `thermalloc: what: why: hint`, and an exit code as `env(1)` and shells use them.
mod elf;
mod failure;
mod library;
mod live;
mod prof;
mod program;
mod run;
mod signals;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::failure::Failure;

/// A memory allocator that keeps hot pages warm and gives cold ones back.
#[derive(Parser)]
#[command(name = "thermalloc", version, arg_required_else_help = false)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Options),
    Prof(prof::Options),
    Stats(live::stats::Options),
    Top(live::top::Options),
}

fn main() -> ExitCode {
    let failure = match Cli::try_parse() {
        Ok(cli) => match cli.command {
            // Comes back only where the program could not be started.
            Command::Run(options) => run::run(options),
            Command::Prof(options) => match prof::prof(options) {
                Ok(()) => return ExitCode::SUCCESS,
                Err(failure) => failure,
            },
            Command::Stats(options) => match live::stats::stats(&options) {
                Ok(()) => return ExitCode::SUCCESS,
                Err(failure) => failure,
            },
            Command::Top(options) => match live::top::top(&options) {
                Ok(()) => return ExitCode::SUCCESS,
                Err(failure) => failure,
            },
        },
        Err(error) if !error.use_stderr() => {
            // Help and version: a reader that closed its end (`| head`) is no error.
            let _ = write!(std::io::stdout(), "{}", error.render());
            return ExitCode::SUCCESS;
        }
        Err(error) => usage(&error),
    };
    let _ = writeln!(std::io::stderr(), "{failure}");
    ExitCode::from(failure.code())
}

/// clap's message on one line; its tips and usage text are what `--help` prints.
fn usage(error: &clap::Error) -> Failure {
    let text = error.render().to_string();
    let first: Vec<&str> =
        text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let what = first.join(" ");
    let what = what.strip_prefix("error: ").unwrap_or(&what);
    Failure::usage(what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_declaration_is_consistent() {
        Cli::command().debug_assert();
    }

    fn one_line(args: &[&str]) -> String {
        let error = Cli::try_parse_from(args).err().expect("a usage error");
        usage(&error).to_string()
    }

    #[test]
    fn usage_errors_are_one_line() {
        assert_eq!(
            one_line(&["thermalloc", "run"]),
            "thermalloc: usage: the following required arguments were not provided: <PROGRAM>...: \
             see 'thermalloc run --help'"
        );
        assert!(one_line(&["thermalloc", "run", "--nonsense", "true"]).contains("'--nonsense'"));
        let without = one_line(&["thermalloc"]);
        assert!(without.contains("requires a subcommand") && !without.contains('\n'));
    }
}
