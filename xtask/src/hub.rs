//! Makes a kernel repository for the hub: folders that the Python package `kernels` opens.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::{XtaskError, run, target};

/// The backends that `kernels` asks for. A build serves all newer minor versions of its CUDA, and one library
/// serves all backends: it finds the NVIDIA driver when it runs.
const BACKENDS: [&str; 3] = ["cpu", "cu120", "cu130"];
/// The oldest GPU.
const OLDEST: &str = "8.0+PTX";

/// Builds the library without debug information, and makes the repository.
pub fn make(root: &Path, out: &Path) -> Result<(), XtaskError> {
    let mut build = Command::new(env!("CARGO"));
    run(build.current_dir(root).args(["build", "--profile", "dist", "-p", "flashcore-capi"]))?;
    write(root, &target(root)?.join("dist/libflashcore_c.so"), out)?;
    println!("xtask: made a repository of the kernels hub in {}", out.display());
    Ok(())
}

/// Makes the repository of a library that is built.
pub fn write(root: &Path, library: &Path, out: &Path) -> Result<(), XtaskError> {
    let source = root.join("bridges/hub");
    for backend in BACKENDS {
        let variant = format!("tvm-ffi01-{backend}-{}-linux", std::env::consts::ARCH);
        let folder = out.join("build").join(variant);
        let io = |source| XtaskError::Io { path: folder.clone(), source };
        fs::create_dir_all(&folder).map_err(io)?;
        fs::copy(library, folder.join("libflashcore.so")).map_err(io)?;
        fs::copy(source.join("__init__.py"), folder.join("__init__.py")).map_err(io)?;
        fs::write(folder.join("metadata.json"), metadata(backend).to_string()).map_err(io)?;
    }
    let readme = out.join("README.md");
    let copied = fs::copy(source.join("README.md"), &readme);
    copied.map(drop).map_err(|source| XtaskError::Io { path: readme, source })
}

fn metadata(backend: &str) -> serde_json::Value {
    let version = env!("CARGO_PKG_VERSION");
    let backend_of = match backend {
        "cpu" => json!({"type": "cpu"}),
        _ => json!({"type": "cuda", "archs": [OLDEST]}),
    };
    json!({
        "id": format!("flashcore_attention_{backend}_{}", version.replace('.', "_")),
        "name": "flashcore-attention",
        "version": 1,
        "license": "MIT OR Apache-2.0",
        "python-depends": [],
        "backend": backend_of,
    })
}
