//! A kernel file and its launch file, joined.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use lab::launchfile::{Bound, LaunchError, LaunchSpec};
use lab::tools::compile_cuda_file;
use ptx::{Target, TargetSuffix};

use crate::error::CliError;

/// Reads both. The text is the PTX that line numbers refer to. PTX for an architecture older than `sm` becomes code of that
/// one, as a driver makes of it.
pub fn load(file: &Path, launch: &Path, sm: Option<Target>) -> Result<(Bound, String), CliError> {
    let refuse = |error| CliError::Launch {
        path: if error == LaunchError::NoEntry { file } else { launch }.to_path_buf(),
        error: Box::new(error),
    };
    let spec: LaunchSpec = read(launch)?.parse().map_err(refuse)?;
    let text = match file.extension().and_then(|e| e.to_str()) {
        Some("ptx") => read(file)?,
        Some("cu") => {
            let target = sm.unwrap_or(Target::sm(80)).to_string();
            compile_cuda_file(&read(file)?, file, &target.replace("sm_", "compute_"))?
        }
        _ => return Err(CliError::Extension(file.to_path_buf())),
    };
    let mut module =
        ptx::parse(&text).map_err(|error| CliError::Parse { path: file.to_path_buf(), error })?;
    if let Err(violations) = module.verify() {
        return Err(CliError::Verify { path: file.to_path_buf(), violations });
    }
    if let Some(device) = sm {
        let target = module.target;
        if !target.runs_on(device.sm) {
            let accepted = match target.suffix {
                TargetSuffix::None => {
                    format!("{} or later, for which {} was written", target.sm, file.display())
                }
                _ => format!("{}: {} was written for {target}", target.sm, file.display()),
            };
            return Err(CliError::Argument { argument: "--sm", value: device.sm.to_string(), accepted });
        }
        module.target = Target { sm: device.sm, ..target };
        module.version = module.version.max(module.target.minimum_version());
    }
    Ok((spec.bind(module).map_err(refuse)?, text))
}

/// Longer than any kernel or launch file, and short enough for memory.
const LONGEST: u64 = 64 << 20;

fn read(path: &Path) -> Result<String, CliError> {
    let fail = |source| CliError::Read { path: path.to_path_buf(), source };
    let mut bytes = Vec::new();
    // Never more, whatever the file says of its length: a device or a pipe may have no end.
    File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes)).map_err(fail)?;
    if bytes.len() as u64 > LONGEST {
        return Err(fail(std::io::Error::other(format!(
            "it is longer than {LONGEST} bytes; is it a kernel?"
        ))));
    }
    match bytes.iter().position(|&byte| byte == 0) {
        Some(at) => Err(fail(std::io::Error::other(format!("it is no text: byte {at} is 0")))),
        None => Ok(String::from_utf8_lossy(&bytes).into_owned()),
    }
}
