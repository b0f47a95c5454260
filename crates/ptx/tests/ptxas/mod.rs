//! NVIDIA's assembler, if `FLASHCORE_PTXAS` names it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use flashcore_ptx::Target;

/// The path of the assembler. Prints a message if it is missing.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("FLASHCORE_PTXAS").map(PathBuf::from);
    if path.is_none() {
        eprintln!("FLASHCORE_PTXAS is not set: no text is given to ptxas");
    }
    path
}

/// Assembles a text for a target.
pub fn assemble(ptxas: &Path, text: &str, target: Target) -> Result<(), String> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("flashcore-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let source = std::env::temp_dir().join(&name).with_extension("ptx");
    let result = source.with_extension("cubin");
    std::fs::write(&source, text).map_err(|e| e.to_string())?;
    let run = Command::new(ptxas)
        .arg("-arch")
        .arg(target.to_string())
        .arg(&source)
        .arg("-o")
        .arg(&result)
        .output()
        .map_err(|e| format!("{}: {e}", ptxas.display()))?;
    // The files of a failed run are kept for inspection.
    if run.status.success() {
        for file in [&source, &result] {
            std::fs::remove_file(file).map_err(|e| e.to_string())?;
        }
        return Ok(());
    }
    Err(format!("{}\n{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr)))
}
