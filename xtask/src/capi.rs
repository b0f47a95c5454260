//! Installs the C library, its header and its pkg-config file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{XtaskError, run, target};

/// The name that programs look for, and the one that linkers look for.
const NAMES: [&str; 2] = ["libflashcore_c.so.1", "libflashcore_c.so"];

/// Installs into `lib`, `include` and `lib/pkgconfig` of a folder.
pub fn install(root: &Path, prefix: &Path) -> Result<(), XtaskError> {
    let mut build = Command::new(env!("CARGO"));
    run(build.current_dir(root).args(["build", "--profile", "dist", "-p", "flashcore-capi"]))?;
    let prefix = std::path::absolute(prefix).map_err(|source| io(prefix, source))?;
    let (libraries, headers) = (prefix.join("lib"), prefix.join("include"));
    let packages = libraries.join("pkgconfig");
    for folder in [&headers, &packages] {
        fs::create_dir_all(folder).map_err(|source| io(folder, source))?;
    }
    let copy = |from: PathBuf, to: PathBuf| fs::copy(from, &to).map_err(|source| io(&to, source));
    copy(target(root)?.join("dist").join(NAMES[1]), libraries.join(NAMES[0]))?;
    let link = libraries.join(NAMES[1]);
    let _ = fs::remove_file(&link);
    symlink(NAMES[0], &link).map_err(|source| io(&link, source))?;
    copy(root.join("crates/capi/include/flashcore.h"), headers.join("flashcore.h"))?;
    let package = packages.join("flashcore.pc");
    fs::write(&package, package_of(&prefix)).map_err(|source| io(&package, source))?;
    println!("xtask: installed flashcore.h, {} and flashcore.pc into {}", NAMES[0], prefix.display());
    Ok(())
}

fn io(path: &Path, source: std::io::Error) -> XtaskError {
    XtaskError::Io { path: path.to_path_buf(), source }
}

fn package_of(prefix: &Path) -> String {
    format!(
        "prefix={}\nName: flashcore\nDescription: Fused attention on NVIDIA GPUs and on the CPU\n\
         Version: {}\nCflags: -I${{prefix}}/include\n\
         Libs: -L${{prefix}}/lib -Wl,-rpath,${{prefix}}/lib -lflashcore_c\n",
        prefix.display(),
        env!("CARGO_PKG_VERSION"),
    )
}
