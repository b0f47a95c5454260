//! Reads a kernel file and its launch file.

use std::path::{Path, PathBuf};

use check::launchfile::{Bound, LaunchError, LaunchSpec};
use host::store::{self, read_text};
use host::tools::compile_cuda_file;
use ptx::{Target, TargetSuffix};

use crate::error::CliError;

/// Reads both files (`-`: PTX or the launch file from standard input) and binds the kernel to its launch. The
/// returned text is the PTX to which line numbers refer. PTX for an architecture older than `sm` is treated
/// as code for `sm`, as a driver would compile it.
pub fn load(file: &Path, launch: &Path, sm: Option<Target>) -> Result<(Bound, String), CliError> {
    let refuse = |error| CliError::Launch {
        path: if error == LaunchError::NoEntry { file } else { launch }.to_path_buf(),
        error: Box::new(error),
    };
    if store::is_standard(file) && store::is_standard(launch) {
        return Err(CliError::Argument {
            argument: "--launch",
            value: "-".to_owned(),
            accepted: "a file, since the kernel is read from standard input".to_owned(),
        });
    }
    let spec: LaunchSpec = read_text(launch)?.parse().map_err(refuse)?;
    let text = match file.extension().and_then(|e| e.to_str()) {
        _ if store::is_standard(file) => read_text(file)?,
        Some("ptx") => read_text(file)?,
        Some("cu") => {
            let target = sm.unwrap_or(Target::sm(80)).to_string();
            compile_cuda_file(&read_text(file)?, file, &target.replace("sm_", "compute_"))?
        }
        _ => return Err(CliError::Extension(file.to_path_buf())),
    };
    let module = ptx::parse(&text).map_err(|error| CliError::Parse { path: file.to_path_buf(), error })?;
    let target = module.target;
    let mut module =
        module.verify().map_err(|violations| CliError::Verify { path: file.to_path_buf(), violations })?;
    if let Some(device) = sm {
        module = module.for_device(device.sm).ok_or_else(|| {
            let accepted = match target.suffix {
                TargetSuffix::None => {
                    format!("{} or later, for which {} was written", target.sm, file.display())
                }
                _ => format!("{}: {} was written for {target}", target.sm, file.display()),
            };
            CliError::Argument { argument: "--sm", value: device.sm.to_string(), accepted }
        })?;
    }
    Ok((spec.bind(module).map_err(refuse)?, text))
}

/// Refuses a file for `--keep-ptx` that cannot be written, before the kernel is run.
pub fn keepable(file: Option<&Path>, inputs: &[(&'static str, &Path)]) -> Result<(), CliError> {
    let Some(file) = file else { return Ok(()) };
    if store::is_standard(file) {
        return Err(CliError::Argument {
            argument: "--keep-ptx",
            value: "-".to_owned(),
            accepted: "a file, since the result is printed to standard output".to_owned(),
        });
    }
    distinct("--keep-ptx", file, inputs)?;
    Ok(store::writable(file)?)
}

/// Refuses `-` as an output file beside an output that goes to standard output anyway.
pub fn not_beside_json(argument: &'static str, output: &Path, json: bool) -> Result<(), CliError> {
    if !(json && store::is_standard(output)) {
        return Ok(());
    }
    let accepted = "a file, since --json prints to standard output".to_owned();
    Err(CliError::Argument { argument, value: "-".to_owned(), accepted })
}

/// Refuses an output file that is also an input file, under whatever name: writing it would destroy the
/// input.
pub fn distinct(
    argument: &'static str,
    output: &Path,
    inputs: &[(&'static str, &Path)],
) -> Result<(), CliError> {
    match inputs.iter().find(|(_, input)| same_file(output, input)) {
        None => Ok(()),
        Some((input, source_path)) => Err(CliError::Overwrites {
            argument,
            path: output.to_path_buf(),
            input,
            source_path: source_path.to_path_buf(),
        }),
    }
}

/// Whether two names lead to the same file: by a symbolic link, a hard link or another spelling. Devices and
/// pipes never count as the same, because writing to them destroys nothing.
fn same_file(a: &Path, b: &Path) -> bool {
    let (Ok(found), Ok(other)) = (std::fs::metadata(a), std::fs::metadata(b)) else { return false };
    found.is_file() && other.is_file() && (is_same(&found, &other) || canonical(a) == canonical(b))
}

fn canonical(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

#[cfg(unix)]
fn is_same(a: &std::fs::Metadata, b: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// On other systems only the canonical names are compared.
#[cfg(not(unix))]
fn is_same(_: &std::fs::Metadata, _: &std::fs::Metadata) -> bool {
    false
}
