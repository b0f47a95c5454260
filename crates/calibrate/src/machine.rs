//! Descriptions of machines for the time model, as `flashcore lab microbench --out` writes them.

use std::path::{Path, PathBuf};

use predict::{Gpu, MachineError};
use serde_json::Value;

use host::store::{self, StoreError};

/// Why a file does not describe a machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineFileError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The file is not a JSON description of a machine.
    #[error("{path}: {error}; expected the JSON that `flashcore lab microbench --out` writes")]
    Malformed { path: PathBuf, error: serde_json::Error },
    /// The described machine is impossible.
    #[error("{path}: {error}")]
    Impossible { path: PathBuf, error: MachineError },
}

/// Reads a machine from the file's object `machine`, or from the whole file when it has no such object. The
/// machine is leaked, so that it has the lifetime `'static` of the table's machines.
///
/// # Errors
/// When the file cannot be read or does not describe a machine.
pub fn read(path: &Path) -> Result<&'static Gpu, MachineFileError> {
    let text = store::read_text(path)?;
    let malformed = |error| MachineFileError::Malformed { path: path.to_path_buf(), error };
    let mut whole: Value = serde_json::from_str(&text).map_err(malformed)?;
    let described = whole.get_mut("machine").map_or_else(|| Value::Null, Value::take);
    let described = if described.is_null() { whole } else { described };
    let gpu: Gpu = serde_json::from_value(described).map_err(malformed)?;
    gpu.check().map_err(|error| MachineFileError::Impossible { path: path.to_path_buf(), error })?;
    Ok(Box::leak(Box::new(gpu)))
}

#[cfg(test)]
mod tests {
    use predict::machine::L4;
    use serde_json::json;

    use super::*;
    use host::store::Scratch;

    #[test]
    fn a_file_describes_a_machine_or_says_what_is_wrong() {
        let scratch = Scratch::new().unwrap();
        let file = scratch.path("machine.json");
        let written = |value: &Value| std::fs::write(&file, value.to_string()).unwrap();
        let mine = Gpu { launch_us: 3.5, ..L4 };
        for value in [json!(mine), json!({ "machine": mine, "measured": [1, 2] })] {
            written(&value);
            assert_eq!(read(&file).unwrap(), &mine);
        }
        written(&json!({ "machine": Gpu { clock_mhz: -1.0, ..L4 } }));
        let error = read(&file).unwrap_err().to_string();
        assert!(error.contains("invalid value '-1' for clock_mhz: expected"), "{error}");
        written(&json!({ "machine": { "name": "L4" } }));
        assert!(read(&file).unwrap_err().to_string().contains("microbench --out"));
        assert!(read(&scratch.path("none")).unwrap_err().to_string().contains("cannot read"));
    }
}
