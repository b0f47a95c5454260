use problem::ProblemError;
use ptx::TensorMapError;

/// Why a launch file cannot be used. Each variant names the key, its value and what would be accepted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LaunchError {
    /// Not TOML, an unknown key, a missing key or a value of the wrong type; the text quotes the place.
    #[error("launch file: {0}")]
    Syntax(String),
    /// A value outside what is accepted.
    #[error("launch file: invalid value '{value}' for {key}: expected {accepted}")]
    Value {
        /// The key, with its table.
        key: String,
        /// The value as written.
        value: String,
        /// What would be accepted.
        accepted: String,
    },
    /// An argument lacks a key that its role needs.
    #[error("launch file: [[arg]] {index} has role = \"{role}\" and needs `{key}`")]
    Missing {
        /// Position of the argument, from 0.
        index: usize,
        /// Its role.
        role: String,
        /// The key.
        key: &'static str,
    },
    /// An argument has a key that means nothing for its role.
    #[error("launch file: [[arg]] {index} has role = \"{role}\", which takes no `{key}`; leave it out")]
    Surplus {
        /// Position of the argument, from 0.
        index: usize,
        /// Its role.
        role: String,
        /// The key.
        key: &'static str,
    },
    /// The hardware would refuse a tensor map.
    #[error("launch file: [[arg]] {index}: {source}")]
    TensorMap {
        /// Position of the argument, from 0.
        index: usize,
        /// The property that does not fit.
        source: TensorMapError,
    },
    /// A role is given twice.
    #[error("launch file: [[arg]] {index} repeats role = \"{role}\"; each tensor is one argument")]
    Repeated {
        /// Position of the second.
        index: usize,
        /// The role.
        role: String,
    },
    /// `[problem]` names something that cannot be computed.
    #[error("launch file: [problem]: {0}")]
    Problem(#[from] ProblemError),
    /// `[problem]` without its answer: nothing could be judged.
    #[error(
        "launch file: [problem] is stated and no [[arg]] is its answer; give one role = \"out\", or a tensor_map of = \"out\", or \
         leave [problem] out"
    )]
    Unjudged,
    /// The module has no kernel.
    #[error("the module has no .entry with a body; nothing to launch")]
    NoEntry,
    /// The named kernel is not in the module.
    #[error(
        "launch file: invalid value '{name}' for launch.entry: expected an entry of the module: {accepted}"
    )]
    UnknownEntry {
        /// The name given.
        name: String,
        /// The entries there are.
        accepted: String,
    },
    /// No kernel is named and the module has several.
    #[error(
        "launch file: launch.entry is missing and the module has several entries; name one of: {accepted}"
    )]
    AmbiguousEntry {
        /// The entries there are.
        accepted: String,
    },
    /// Numbers of arguments and parameters differ.
    #[error("launch file: {args} [[arg]] given, but entry {entry} takes {params} parameters: {list}")]
    Count {
        /// The entry.
        entry: String,
        /// Arguments given.
        args: usize,
        /// Parameters wanted.
        params: usize,
        /// The parameters, printed.
        list: String,
    },
    /// An argument does not fit its parameter.
    #[error(
        "launch file: [[arg]] {index} ({role}) is {given}, but parameter {parameter} of the entry is {wanted}"
    )]
    Mismatch {
        /// Position of the argument, from 0.
        index: usize,
        /// Its role.
        role: String,
        /// What the role passes.
        given: String,
        /// Name of the parameter.
        parameter: String,
        /// The parameter's type.
        wanted: String,
    },
}

impl LaunchError {
    pub(super) fn value(
        key: impl Into<String>,
        value: impl ToString,
        accepted: impl Into<String>,
    ) -> LaunchError {
        let value = value.to_string();
        let key = key.into();
        // The message has quotes of its own. Where a number is expected, those of a text tell the two apart.
        let text = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let bare = text.filter(|_| !key.ends_with(" value")).unwrap_or(&value);
        LaunchError::Value { key, value: ptx::quote::cut(bare).into_owned(), accepted: accepted.into() }
    }
}
