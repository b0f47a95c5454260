//! Prints usage errors.

use std::error::Error;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::terminal;

/// Prints a message of clap: the help, or an error that quotes arguments as they were given. Control
/// characters in the arguments are escaped.
pub fn refuse(error: &clap::Error) {
    if let Some(words) = words(error) {
        return terminal::fault(words);
    }
    let text = error.render().to_string();
    if terminal::escaped(&text) == text {
        // An error here means that the reader has closed the pipe.
        let _ = error.print();
    } else {
        terminal::aside(text.trim_end().replace('\n', "\n  "));
    }
}

/// The message for a rejected value, in the form of this program's other errors about values, and for a
/// missing, unknown or conflicting argument and a missing command: one line. `None` for all other errors, for
/// which clap's own text is used.
pub fn words(error: &clap::Error) -> Option<String> {
    if let (ErrorKind::MissingSubcommand, Some(ContextValue::Strings(commands))) =
        (error.kind(), error.get(ContextKind::ValidSubcommand))
    {
        let hidden = super::command();
        let hidden = |name: &str| hidden.find_subcommand(name).is_some_and(clap::Command::is_hide_set);
        let shown: Vec<&str> = commands.iter().map(String::as_str).filter(|name| !hidden(name)).collect();
        return Some(format!("missing a command: expected one of {}", shown.join(", ")));
    }
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let list = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join("', '"),
        _ => String::new(),
    };
    match error.kind() {
        ErrorKind::MissingRequiredArgument => {
            return Some(format!("missing '{}'", list(ContextKind::InvalidArg)));
        }
        ErrorKind::ArgumentConflict => {
            let [argument, other] = [ContextKind::InvalidArg, ContextKind::PriorArg].map(list);
            let with =
                if argument == other { "multiple times".to_owned() } else { format!("with '{other}'") };
            return Some(format!("'{argument}' cannot be used {with}"));
        }
        ErrorKind::UnknownArgument => {
            let hint = text(ContextKind::SuggestedArg).map(|near| format!("; did you mean '{near}'?"));
            let argument = ptx::quote::cut(text(ContextKind::InvalidArg)?);
            return Some(format!("unexpected argument '{argument}'{}", hint.unwrap_or_default()));
        }
        ErrorKind::InvalidSubcommand => {
            let hint = text(ContextKind::SuggestedSubcommand).map(str::to_owned);
            let hint = hint.unwrap_or_else(|| list(ContextKind::SuggestedSubcommand));
            let hint = if hint.is_empty() { hint } else { format!("; did you mean '{hint}'?") };
            let command = ptx::quote::cut(text(ContextKind::InvalidSubcommand)?);
            return Some(format!("unknown command '{command}'{hint}"));
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {}
        _ => return None,
    }
    let value = text(ContextKind::InvalidValue).filter(|value| !value.is_empty())?;
    // The argument as clap shows it: `--layout <LAYOUT>` or `<FILE>`.
    let shown = text(ContextKind::InvalidArg)?;
    let argument = shown.split_whitespace().next()?.trim_matches(['<', '>']);
    let expected = match (error.get(ContextKind::ValidValue), error.source()) {
        (Some(ContextValue::Strings(values)), _) => match values.as_slice() {
            [one] => one.clone(),
            [first @ .., last] => format!("{} or {last}", first.join(", ")),
            [] => return None,
        },
        (_, Some(source)) => {
            let source = source.to_string();
            // The libraries' errors name the argument in words: `invalid value 'x' for dtype: expected f16`.
            let named = source.strip_prefix("invalid value ").and_then(|rest| rest.split_once(": expected "));
            match (source.strip_prefix("expected ").or(named.map(|(_, expected)| expected)), source.as_str())
            {
                (Some(expected), _) => expected.to_owned(),
                (None, "invalid digit found in string") => "a whole number".to_owned(),
                (None, "invalid float literal") => "a number".to_owned(),
                (None, other) => format!("another value ({other})"),
            }
        }
        _ => return None,
    };
    // A list, such as `--grid <X[,Y[,Z]]>`.
    let list =
        shown.split_once(" <").and_then(|(_, name)| name.strip_suffix('>')).filter(|n| n.contains(','));
    let expected = list.map_or(expected.clone(), |form| format!("{expected} for each part of {form}"));
    let hint = text(ContextKind::SuggestedValue).map(|near| format!("; did you mean '{near}'?"));
    let (value, hint) = (ptx::quote::cut(value), hint.unwrap_or_default());
    Some(format!("invalid value '{value}' for {argument}: expected {expected}{hint}"))
}
