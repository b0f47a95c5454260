//! A launch stated on the command line, for kernels whose arguments are buffers and numbers.

use super::memory::{BufferType, RANK};
use super::raw::{RawArg, RawFile, RawLaunch};
use super::scalar::ScalarType;
use super::{LaunchError, LaunchSpec};

/// A launch without a launch file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Brief {
    pub entry: Option<String>,
    pub grid: Vec<i64>,
    pub block: Option<Vec<i64>>,
    pub cluster: Option<Vec<i64>>,
    pub dynamic_shared: Option<i64>,
    pub cooperative: bool,
    /// One text per parameter: `NAME:TYPE=VALUE` or `NAME:TYPE:SHAPE[=INIT]`.
    pub args: Vec<String>,
}

/// The accepted forms of an argument.
const FORMS: &str = "NAME:TYPE=VALUE for a number (n:i32=1000), or NAME:TYPE:SHAPE[=INIT] for a buffer \
     (x:f32:1024=random, a:f16:64x32)";

/// The accepted forms of a buffer's contents.
const INITS: &str = "zeros, random, iota, uninitialised, a number, inf, -inf, nan, LOW..HIGH for random integers, or \
     @FILE.npy or @FILE.safetensors:NAME";

impl Brief {
    /// The launch in the form that a launch file would give.
    ///
    /// # Errors
    /// A [`LaunchError`] that names the option, its value and the accepted forms.
    pub fn spec(&self) -> Result<LaunchSpec, LaunchError> {
        let arg = self.args.iter().map(|text| arg_of(text)).collect::<Result<Vec<_>, _>>()?;
        let launch = RawLaunch {
            entry: self.entry.clone(),
            grid: self.grid.clone(),
            cluster: self.cluster.clone(),
            block: self.block.clone(),
            dynamic_shared: self.dynamic_shared,
            cooperative: self.cooperative.then_some(true),
            ..RawLaunch::default()
        };
        LaunchSpec::of(&RawFile {
            problem: None,
            launch: vec![launch],
            arg,
            constant: Vec::new(),
            reference: Vec::new(),
        })
    }
}

fn arg_of(text: &str) -> Result<RawArg, LaunchError> {
    let refuse = |accepted: &str| LaunchError::Option {
        value: ptx::quote::cut(text).into_owned(),
        accepted: accepted.to_owned(),
    };
    let (left, right) = match text.split_once('=') {
        Some((left, right)) => (left, Some(right)),
        None => (text, None),
    };
    let parts: Vec<&str> = left.split(':').collect();
    let arg = RawArg { name: Some(parts[0].to_owned()), ..RawArg::default() };
    match (&parts[..], right) {
        ([_, ty], Some(value)) => {
            if ty.parse::<ScalarType>().is_err() {
                return Err(refuse(&format!("a type of a number: {}", ScalarType::ACCEPTED.trim_end())));
            }
            Ok(RawArg { role: (*ty).to_owned(), value: Some(number(value)), ..arg })
        }
        ([_, ty, shape], init) => {
            if ty.parse::<BufferType>().is_err() {
                return Err(refuse(&format!("a type of elements: {}", BufferType::ACCEPTED.trim_end())));
            }
            let extents: Result<Vec<i64>, _> = shape.split('x').map(str::parse).collect();
            let extents =
                extents.ok().filter(|e| e.len() <= RANK && e.iter().all(|&n| n > 0)).ok_or_else(|| {
                    refuse(&format!("a shape of one to {RANK} numbers of 1 or more, such as 1024 or 64x32"))
                })?;
            let init = init.map(|init| contents(init).ok_or_else(|| refuse(INITS))).transpose()?;
            Ok(RawArg {
                role: "buffer".to_owned(),
                dtype: Some((*ty).to_owned()),
                shape: Some(extents),
                init,
                ..arg
            })
        }
        _ => Err(refuse(FORMS)),
    }
}

/// A value as TOML parses it. A word that is not a number stays a text, which the argument's type rejects.
fn number(text: &str) -> toml::Value {
    let integer = text.parse::<i64>().map(toml::Value::Integer);
    let float = || text.parse::<f64>().map(toml::Value::Float);
    let truth = || text.parse::<bool>().map(toml::Value::Boolean);
    integer.or_else(|_| float()).or_else(|_| truth()).unwrap_or_else(|_| toml::Value::String(text.to_owned()))
}

fn contents(text: &str) -> Option<toml::Value> {
    let table = |key: &str, value: toml::Value| {
        Some(toml::Value::Table([(key.to_owned(), value)].into_iter().collect()))
    };
    if let Some(path) = text.strip_prefix('@') {
        return table("file", toml::Value::String(path.to_owned()));
    }
    if let Some((low, high)) = text.split_once("..") {
        let ends = [low.parse::<i64>().ok()?, high.parse::<i64>().ok()?];
        return table("integers", toml::Value::Array(ends.map(toml::Value::Integer).to_vec()));
    }
    match text {
        "zeros" | "random" | "iota" | "uninitialised" | "inf" | "-inf" | "nan" => {
            Some(toml::Value::String(text.to_owned()))
        }
        _ => Some(number(text)).filter(|value| !value.is_str() && !value.is_bool()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launchfile::{ArgSpec, Init};

    fn brief(args: &[&str]) -> Result<LaunchSpec, LaunchError> {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Brief { grid: vec![8], block: Some(vec![128]), args, ..Brief::default() }.spec()
    }

    #[test]
    fn options_state_buffers_and_numbers() {
        let spec =
            brief(&["out:f32:1024", "x:f16:64x32=random", "n:i32=-7", "i:i32:9=0..4", "s:f32=0.5"]).unwrap();
        let roles: Vec<&str> = spec.args.iter().map(ArgSpec::role).collect();
        assert_eq!(roles, ["buffer", "buffer", "i32", "buffer", "f32"]);
        assert_eq!(spec.name_of(1), "x");
        let ArgSpec::Buffer(x) = &spec.args[1] else { panic!() };
        assert_eq!((x.elements, x.shaped().shape(), x.init), (2048, &[64, 32][..], Init::Random));
        let ArgSpec::Buffer(i) = &spec.args[3] else { panic!() };
        assert_eq!(i.init, Init::Integers { low: 0, high: 4 });
    }

    #[test]
    fn refusals_name_the_option() {
        for (arg, said) in [
            ("out", "invalid value 'out' for --arg: expected NAME:TYPE=VALUE"),
            ("x:f33:4", "for --arg: expected a type of elements: u8 i8"),
            ("n:int=4", "for --arg: expected a type of a number: bool u8"),
            ("x:f32:0", "for --arg: expected a shape"),
            ("x:f32:4=ones", "for --arg: expected zeros, random"),
            ("n:u8=300", "invalid value '300' for [[arg]] 0 value: expected a whole number from 0 to 255"),
            ("1x:u8=3", "invalid value '1x' for [[arg]] 0 name: expected letters"),
        ] {
            let error = brief(&[arg]).unwrap_err().to_string();
            assert!(error.contains(said), "{arg}: {error}");
        }
    }
}
