//! The help of the program: examples, shell completions, manual pages, and the words of a usage error.

mod examples;
mod man;
mod usage;

use std::io::Write;

use clap::{CommandFactory, builder::StyledStr};

use crate::args::{Cli, Completions, Man};
use crate::error::CliError;
use crate::{Status, unless_closed};

pub use usage::refuse;

/// The command line as clap parses it, with the examples of each command.
pub fn command() -> clap::Command {
    with_examples(numbers(Cli::command()), &mut Vec::new())
}

/// Options that take a list of numbers.
const LISTS: [&str; 6] = ["problem", "held_out", "window", "grid", "block", "cluster"];

/// Makes every option that takes a value accept `-1` as its value, and every option that takes a list `-1,3`.
/// The error message is then about the value, not about an unknown option `-1`.
fn numbers(command: clap::Command) -> clap::Command {
    let values = |arg: clap::Arg| {
        let takes = arg.get_action().takes_values();
        let is_list = LISTS.contains(&arg.get_id().as_str());
        arg.allow_negative_numbers(takes).allow_hyphen_values(is_list)
    };
    command.mut_args(values).mut_subcommands(numbers)
}

/// Puts the examples of each command below its help. `path` is the command's name, word by word.
fn with_examples(command: clap::Command, path: &mut Vec<String>) -> clap::Command {
    let Some(examples) = examples::of(&path.join(" ")) else { return command_below(command, path) };
    let examples: String = examples.iter().map(|line| format!("\n  {line}")).collect();
    let above = |rest: Option<&StyledStr>| {
        format!("Examples:{examples}{}", rest.map_or(String::new(), |rest| format!("\n\n{rest}")))
    };
    let short = above(command.get_after_help());
    let long = command.get_after_long_help().map(|long| above(Some(long)));
    let command = command.after_help(short);
    let command = match long {
        Some(long) => command.after_long_help(long),
        None => command,
    };
    command_below(command, path)
}

fn command_below(command: clap::Command, path: &mut Vec<String>) -> clap::Command {
    command.mut_subcommands(|below| {
        path.push(below.get_name().to_owned());
        let below = with_examples(below, path);
        path.pop();
        below
    })
}

/// The command line without hidden commands, for completions.
fn visible() -> clap::Command {
    let all = command();
    clap::Command::new("flashcore")
        .version(env!("CARGO_PKG_VERSION"))
        .args(all.get_arguments().cloned())
        .groups(all.get_groups().cloned())
        .subcommands(all.get_subcommands().filter(|below| !below.is_hide_set()).cloned())
}

/// Prints the completions of a shell (`flashcore completions`).
pub fn completions(args: &Completions) -> Result<Status, CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut visible(), "flashcore", &mut script);
    unless_closed(std::io::stdout().lock().write_all(&script).map_err(CliError::from))?;
    Ok(Status::Passed)
}

/// Prints or writes manual pages (`flashcore man`).
pub fn man(args: &Man) -> Result<Status, CliError> {
    match &args.out {
        Some(folder) => {
            let failed = |source| CliError::Write { path: folder.clone(), source };
            std::fs::create_dir_all(folder).map_err(failed)?;
            man::write_all(command(), folder).map_err(failed)?;
        }
        None => {
            let mut program = command();
            program.build();
            let page = man::page(named(&program, &args.command)?)?;
            unless_closed(std::io::stdout().lock().write_all(page.as_bytes()).map_err(CliError::from))?;
        }
    }
    Ok(Status::Passed)
}

/// The command that words name, below `command`.
fn named<'a>(command: &'a clap::Command, words: &[String]) -> Result<&'a clap::Command, CliError> {
    words.iter().try_fold(command, |command, word| {
        let shown = command.get_subcommands().filter(|below| !below.is_hide_set());
        let names: Vec<&str> = shown.map(clap::Command::get_name).filter(|name| *name != "help").collect();
        command.find_subcommand(word).ok_or_else(|| CliError::Argument {
            argument: "COMMAND",
            value: words.join(" "),
            accepted: match names.is_empty() {
                true => format!("no word after {}", command.get_name()),
                false => format!("one of {}", names.join(", ")),
            },
        })
    })
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    /// Calls `look` on each command that a user sees and that does something, with its path.
    fn each(command: &clap::Command, path: &str, look: &mut dyn FnMut(&str, &clap::Command)) {
        let below = || command.get_subcommands().filter(|below| !below.is_hide_set());
        if below().next().is_none() {
            look(path, command);
        }
        for command in below().filter(|below| below.get_name() != "help") {
            each(command, &format!("{path} {}", command.get_name()), look);
        }
    }

    #[test]
    fn clap_finds_no_fault() {
        command().debug_assert();
    }

    #[test]
    fn the_help_of_every_command_has_examples_of_itself() {
        let mut seen = 0;
        each(&command(), "flashcore", &mut |path, command| {
            let help = command.clone().render_long_help().to_string();
            let (_, examples) = help.split_once("Examples:\n").unwrap_or_else(|| panic!("{path}: {help}"));
            let first = examples.lines().next().unwrap_or_default();
            assert!(first.contains(path), "{path}: {first}");
            seen += 1;
        });
        assert!(seen > 20, "{seen} commands");
    }

    /// Parses a line of a shell. Its pipes, redirections and comments are left out.
    fn parse(line: &str) -> Result<Cli, clap::Error> {
        let line = line.split([';', '|', '>', '<', '#']).next().unwrap_or_default();
        let quote = if line.contains('"') { '"' } else { '\'' };
        let words = line.split(quote).enumerate().flat_map(|(at, part)| match at % 2 {
            0 => part.split_whitespace().collect(),
            _ => vec![part],
        });
        let matches = command().try_get_matches_from(std::iter::once("flashcore").chain(words))?;
        Cli::from_arg_matches(&matches)
    }

    #[test]
    fn hidden_commands_are_not_completed() {
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh, clap_complete::Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut visible(), "flashcore", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(!script.contains("sandboxed"), "{shell}");
            assert!(script.contains("forecast") && script.contains("random-share"), "{shell}");
        }
    }

    #[test]
    fn options_stand_under_their_own_headings() {
        let command = command();
        for name in ["check", "explain"] {
            let command = command.find_subcommand(name).unwrap();
            let heading = |id: &str| {
                let found = command.get_arguments().find(|arg| arg.get_id() == id).unwrap();
                found.get_help_heading().map(str::to_owned)
            };
            for option in ["launch", "timeout", "sm", "gpu", "keep_ptx"] {
                assert_eq!(heading(option), None, "{name} --{option}");
            }
            assert_eq!(heading("define").as_deref(), Some("CUDA C++"));
            assert_eq!(heading("constexpr").as_deref(), Some("Triton"));
        }
    }

    #[test]
    fn every_example_is_accepted() {
        for line in examples::all() {
            let parsed = line.strip_prefix("flashcore ").map(parse).unwrap_or_else(|| panic!("{line}"));
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
        assert!(examples::all().count() > 25);
    }

    /// The commands in the book and in the README.
    #[test]
    fn every_command_of_the_documents_is_accepted() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut open = vec![root.join("docs/src"), root.join("README.md"), root.join("python/README.md")];
        let mut seen = 0;
        while let Some(path) = open.pop() {
            if path.is_dir() {
                open.extend(std::fs::read_dir(&path).unwrap().flatten().map(|entry| entry.path()));
                continue;
            }
            if path.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap().replace("\\\n", " ");
            let mut fenced = false;
            for line in text.lines() {
                fenced ^= line.starts_with("```");
                if !fenced && !line.starts_with("    ") {
                    continue;
                }
                let line = line.trim_start();
                let before =
                    ["flashcore ", "cargo run --release -- ", "cargo run --release --features search -- "];
                let typed = before.iter().find_map(|prefix| line.strip_prefix(prefix));
                if let Some(typed) = typed {
                    seen += 1;
                    let parsed = parse(typed);
                    assert!(parsed.is_ok(), "{}: {line}: {}", path.display(), parsed.unwrap_err());
                }
            }
        }
        assert!(seen > 20, "{seen} commands");
    }

    #[test]
    fn a_bad_value_says_what_is_expected() {
        let cases: [(&[&str], &str); 6] = [
            (
                &["check", "k.ptx", "--launch", "l", "--timeout", "soon"],
                "invalid value 'soon' for --timeout: expected a number of seconds above 0, at most 1000000000",
            ),
            (
                &["bench", "--control", "0"],
                "invalid value '0' for --control: expected a whole number, 1 or more",
            ),
            (
                &["completions", "bsh"],
                "invalid value 'bsh' for SHELL: expected bash, elvish, fish, powershell or zsh; did you mean 'bash'?",
            ),
            (
                &["doctor", "--color", "red"],
                "invalid value 'red' for --color: expected auto, always or never",
            ),
            (
                &["evolve", "--random-share", "half"],
                "invalid value 'half' for --random-share: expected a number",
            ),
            (
                &["serve", "--bind", "home"],
                "invalid value 'home' for --bind: expected an IP address, such as 127.0.0.1",
            ),
        ];
        for (args, words) in cases {
            let error = command().try_get_matches_from([&["flashcore"], args].concat()).unwrap_err();
            assert_eq!(usage::words(&error).as_deref(), Some(words));
        }
    }

    #[test]
    fn json_may_stand_anywhere() {
        for line in [
            "--json doctor",
            "doctor --json",
            "--json ledger runs",
            "ledger --json runs",
            "ledger runs --json",
        ] {
            let matches = command().try_get_matches_from(std::iter::once("flashcore").chain(line.split(' ')));
            let cli = Cli::from_arg_matches(&matches.unwrap()).unwrap();
            let below = match &cli.command {
                crate::args::Command::Doctor(args) => args.json,
                crate::args::Command::Ledger(crate::args::LedgerCommand::Runs(args)) => args.json,
                _ => false,
            };
            assert!(below && cli.output.json, "{line}");
        }
    }
}
