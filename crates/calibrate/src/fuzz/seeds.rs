//! The seeds of mutations: the kernels of `filetests/`, each with a launch file.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::Case;
use host::store::StoreError;

/// Every `.ptx` file under `filetests/` with a launch file: the one in the same folder, else the one in the
/// comments of the PTX, else a generated one.
///
/// # Errors
/// When a folder or file cannot be read.
pub fn kernels(filetests: &Path) -> Result<Vec<Case>, StoreError> {
    let mut cases = Vec::new();
    for purpose in ["corpus", "run", "hazard", "parse", "verify", "emit"] {
        for path in ptx_files(&filetests.join(purpose))? {
            let ptx = read(&path)?;
            let launch = match purpose {
                // The targets of a kernel share a launch file: `name_sm80.ptx` has `name.toml`.
                "corpus" => {
                    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
                    let name = stem.rsplit_once('_').map_or(stem.as_str(), |(name, _)| name);
                    read(&path.with_file_name(format!("{name}.toml")))?
                }
                _ => launch_for(&ptx),
            };
            cases.push(Case { ptx, launch });
        }
    }
    Ok(cases)
}

fn read(path: &Path) -> Result<String, StoreError> {
    std::fs::read_to_string(path).map_err(|source| StoreError::Read { path: path.to_path_buf(), source })
}

fn ptx_files(folder: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let fail = |source| StoreError::Read { path: folder.to_path_buf(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.extension().is_some_and(|e| e == "ptx") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// A launch file for a kernel: made from its comments (`// launch: grid=2 block=64`, `// arg: u32 5`),
/// otherwise with one small CTA and a buffer or a number for each parameter.
pub fn launch_for(ptx: &str) -> String {
    let directives = |key: &str| -> Vec<&str> {
        let found = ptx.lines().filter_map(|l| l.strip_prefix("// ")?.strip_prefix(key)?.strip_prefix(": "));
        found.collect()
    };
    let mut launch = "[launch]\n".to_owned();
    let mut block = "block = [64]\n".to_owned();
    let mut grid = "grid = [2]\n".to_owned();
    for (key, value) in
        directives("launch").iter().flat_map(|l| l.split_whitespace()).filter_map(|s| s.split_once('='))
    {
        match key {
            "grid" => grid = format!("grid = [{value}]\n"),
            "block" => block = format!("block = [{value}]\n"),
            "shared" => block += &format!("dynamic_shared = {value}\n"),
            _ => {}
        }
    }
    launch = launch + &grid + &block;
    let args = directives("arg");
    let wanted =
        if args.is_empty() { parameters(ptx) } else { args.into_iter().map(str::to_owned).collect() };
    for arg in wanted {
        match arg.split_once(' ') {
            Some((role, value)) => _ = write!(launch, "\n[[arg]]\nrole = \"{role}\"\nvalue = {value}\n"),
            None => {
                launch += "\n[[arg]]\nrole = \"buffer\"\ndtype = \"u32\"\nelements = 1024\ninit = \"iota\"\n"
            }
        }
    }
    launch
}

/// A buffer for each parameter of 8 bytes of the first entry, a number for each other one.
fn parameters(ptx: &str) -> Vec<String> {
    let Ok(module) = ptx::parse(ptx) else { return Vec::new() };
    let Some(entry) = module.entries().next() else { return Vec::new() };
    let arg = |p: &ptx::Param| match (p.bytes(), p.ty.is_float()) {
        (4, true) => "f32 0.5".to_owned(),
        (4, false) => "u32 64".to_owned(),
        _ => "buffer".to_owned(),
    };
    entry.params.iter().map(arg).collect()
}
