//! The reasons why a launch file cannot be used.

use problem::ProblemError;
use ptx::TensorMapError;

/// Why a launch file cannot be used. Each variant names the key, its value and what is accepted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LaunchError {
    /// Not TOML, an unknown key, a missing key or a value of the wrong type. The text quotes the place.
    #[error("launch file: {0}")]
    Syntax(String),
    /// A value outside the accepted range.
    #[error("launch file: invalid value '{value}' for {key}: expected {accepted}")]
    Value {
        /// The key, with its table.
        key: String,
        /// The value as written.
        value: String,
        accepted: String,
    },
    /// An argument lacks a key that its role needs.
    #[error("launch file: [[arg]] {index} has role = \"{role}\" and needs `{key}`")]
    Missing {
        /// Position of the argument, from 0.
        index: usize,
        role: String,
        key: &'static str,
    },
    /// An argument has a key that its role does not use.
    #[error("launch file: [[arg]] {index} has role = \"{role}\", which takes no `{key}`; leave it out")]
    Surplus {
        /// Position of the argument, from 0.
        index: usize,
        role: String,
        key: &'static str,
    },
    /// The hardware does not support a tensor map.
    #[error("launch file: [[arg]] {index}: {source}")]
    TensorMap {
        /// Position of the argument, from 0.
        index: usize,
        /// The property that is not supported.
        source: TensorMapError,
    },
    #[error("launch file: [[arg]] {index} repeats role = \"{role}\"; each tensor is one argument")]
    Repeated {
        /// Position of the second argument, from 0.
        index: usize,
        role: String,
    },
    /// `[problem]` states an invalid problem.
    #[error("launch file: [problem]: {0}")]
    Problem(#[from] ProblemError),
    /// `[problem]` is given without an output, so no output could be judged.
    #[error(
        "launch file: [problem] is given, but no [[arg]] is its output; give one of them role = \"out\" \
        or a tensor_map of = \"out\", or omit [problem]"
    )]
    Unjudged,
    /// An argument on the command line.
    #[error("invalid value '{value}' for --arg: expected {accepted}")]
    Option {
        /// The value as given.
        value: String,
        accepted: String,
    },
    /// A file that the launch file names.
    #[error("launch file: {key}: {reason}")]
    File {
        /// The key that names the file.
        key: String,
        /// Why it cannot be used.
        reason: String,
    },
    /// The launch file names files, and the caller does not read files.
    #[error("launch file: {key} names a file; only `check` and `explain` read files")]
    Unread {
        /// The key that names the file.
        key: String,
    },
    /// A constant that makes the module illegal.
    #[error("launch file: [[constant]]: {0}")]
    Constant(ptx::Violations),
    #[error("the module has no .entry with a body; nothing to launch")]
    NoEntry,
    /// The module has no kernel of the given name.
    #[error(
        "launch file: invalid value '{name}' for {key}.entry: expected an entry of the module: {accepted}"
    )]
    UnknownEntry {
        /// The table that names the entry.
        key: String,
        name: String,
        /// The module's entries.
        accepted: String,
    },
    /// No kernel is named, and the module has several.
    #[error(
        "launch file: {key}.entry is missing and the module has several entries; name one of: {accepted}"
    )]
    AmbiguousEntry {
        /// The table without a name.
        key: String,
        /// The module's entries.
        accepted: String,
    },
    /// The numbers of arguments and parameters differ.
    #[error(
        "launch file: {args} {}, but entry {entry} takes {params} parameters: {list}",
        if *listed { "arguments given in launch.args" } else { "[[arg]] given" }
    )]
    Count {
        entry: String,
        /// Number of arguments given.
        args: usize,
        /// Whether the launch lists its arguments.
        listed: bool,
        /// Number of parameters of the entry.
        params: usize,
        /// The parameters, printed.
        list: String,
    },
    #[error(
        "launch file: [[arg]] {index} ({role}) is {given}, but parameter {parameter} of the entry is {wanted}"
    )]
    Mismatch {
        /// Position of the argument, from 0.
        index: usize,
        role: String,
        /// The kind of value that the role passes.
        given: String,
        parameter: String,
        wanted: String,
    },
}

impl LaunchError {
    pub(crate) fn value(
        key: impl Into<String>,
        value: impl ToString,
        accepted: impl Into<String>,
    ) -> LaunchError {
        let value = value.to_string();
        let key = key.into();
        // The message has its own quotes. Where a number is expected, the quotes of a string are kept to show
        // the mistake.
        let text = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let bare = text.filter(|_| !key.ends_with(" value")).unwrap_or(&value);
        LaunchError::Value { key, value: ptx::quote::cut(bare).into_owned(), accepted: accepted.into() }
    }
}
