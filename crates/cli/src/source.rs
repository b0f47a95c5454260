//! A kernel file and its launch file, joined.

use std::path::Path;

use lab::launchfile::{Bound, LaunchSpec};
use lab::tools::compile_cuda;

use crate::error::CliError;

/// Reads both. The text is the PTX that line numbers refer to.
pub fn load(file: &Path, launch: &Path, sm: u32) -> Result<(Bound, String), CliError> {
    let spec: LaunchSpec = read(launch)?.parse()?;
    let source = read(file)?;
    let text = match file.extension().and_then(|e| e.to_str()) {
        Some("ptx") => source,
        Some("cu") => compile_cuda(&source, &format!("compute_{sm}"))?,
        _ => return Err(CliError::Extension(file.to_path_buf())),
    };
    let module = ptx::parse(&text).map_err(|error| CliError::Parse { path: file.to_path_buf(), error })?;
    Ok((spec.bind(module)?, text))
}

fn read(path: &Path) -> Result<String, CliError> {
    std::fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .map_err(|source| CliError::Read { path: path.to_path_buf(), source })
}
