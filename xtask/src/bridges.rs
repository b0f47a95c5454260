//! The bridges in Python. Their packages have versions of their own, which are pinned here.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{XtaskError, hub, run, target, wheel};

/// The packages of JAX, TVM-FFI and the kernels hub, for the CPU: 700 MB.
const PACKAGES: [&str; 6] = [
    "jax==0.10.2",
    "jaxlib==0.10.2",
    "apache-tvm-ffi==0.1.15.post2",
    "jax-tvm-ffi==0.1.3",
    "kernels==0.17.2",
    "pytest==9.2.0",
];

/// The environment with these packages. Other checks run while it is installed, which takes up to a minute.
///
/// # Errors
/// When it cannot be installed.
pub fn environment(root: &Path) -> Result<PathBuf, XtaskError> {
    wheel::installed(&root.join(".tools/jax"), &[], &PACKAGES)
}

/// Tests JAX and TVM-FFI on the package as it is in the repository, and the kernels hub on the folder that is
/// made for it. PyTorch and JAX run in processes of their own.
///
/// # Errors
/// When a command fails.
pub fn python(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    let python = environment(root)?;
    // One command, with the features of the wheel under test, so that cargo compiles each crate once: alone,
    // the library for C would have fewer features.
    let both = ["-p", "flashcore-python", "-p", "flashcore-capi", "--features", "flashcore-python/evolve"];
    run(cargo().args(["build", "--quiet"]).args(both))?;
    let (built, out) = (target(root)?.join("debug"), target(root)?.join("bridges-python"));
    package(root, &built.join("lib_flashcore.so"), &out.join("flashcore_attn"))?;
    hub::write(root, &built.join("libflashcore_c.so"), &out.join("hub"))?;
    let torch = wheel::torch(root)?;
    let packages = Command::new(&torch)
        .args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')"])
        .output()
        .map_err(|source| XtaskError::Io { path: torch.clone(), source })?;
    let packages = String::from_utf8_lossy(&packages.stdout).into_owned();
    let tests = root.join("bridges/tests");
    let pytest = |path: &Path, names: &[&str]| {
        let mut pytest = Command::new(&python);
        pytest.current_dir(&out).env("PYTHONPATH", path).env("FLASHCORE_HUB", out.join("hub"));
        pytest.args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]);
        run(pytest.args(names.iter().map(|name| tests.join(name))))
    };
    pytest(&out, &["test_jax.py", "test_jax_tvm_ffi.py"])?;
    pytest(Path::new(&packages), &["test_hub.py"])
}

/// The package `flashcore_attn` as a folder of links to its files and to the library.
fn package(root: &Path, library: &Path, folder: &Path) -> Result<(), XtaskError> {
    let io = |source| XtaskError::Io { path: folder.to_owned(), source };
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(io)?;
    }
    fs::create_dir_all(folder).map_err(io)?;
    let files = fs::read_dir(root.join("python/flashcore_attn")).map_err(io)?;
    for file in files.flatten().filter(|file| !file.file_name().to_string_lossy().ends_with(".so")) {
        symlink(file.path(), folder.join(file.file_name())).map_err(io)?;
    }
    symlink(library, folder.join("_flashcore.abi3.so")).map_err(io)
}
