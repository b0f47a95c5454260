//! CUDA C++ kernels of `filetests/`. NVRTC makes their PTX when a test asks for it, and the folder
//! `tmp/nvrtc` of the build keeps the PTX for later runs.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use host::cuda::{Options, Source, compile_files};
use host::tools::nvrtc;

/// The folder of kernels with their hazards by source line.
pub fn folder() -> PathBuf {
    crate::root().join("cuda")
}

/// The PTX of `NAME.cu` in [`folder`], in which the file is called `filetests/cuda/NAME.cu`.
///
/// # Panics
/// As for [`compiled`].
pub fn ptx(name: &str) -> Option<String> {
    compiled(&folder().join(name).with_extension("cu"))
}

/// The target that a source states in a line `// sm: 90a`; without it, 80.
pub(crate) fn target(source: &str) -> &str {
    source.lines().find_map(|line| line.strip_prefix("// sm: ")).unwrap_or("80")
}

/// The PTX of a file. `None` where NVRTC is not installed, which standard error then says: a test of the PTX
/// is not run.
///
/// # Panics
/// When FLASHCORE_NVRTC names a library that cannot be loaded, NVRTC rejects the source, or a file cannot be
/// read or written.
pub fn compiled(file: &Path) -> Option<String> {
    let text = crate::read(file);
    let name = crate::stem(file);
    let Some(library) = nvrtc() else {
        crate::not_run(format_args!("{name}.cu needs NVRTC, which is not installed"));
        return None;
    };
    let kept = kept(file, &text, &library);
    if let Ok(ptx) = fs::read_to_string(&kept) {
        return Some(ptx);
    }
    let options = Options { arch: format!("compute_{}", target(&text)), ..Options::default() };
    let compiled = compile_files(&[Source { file: file.to_path_buf(), text }], &options)
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let ptx = portable(&compiled.ptx);
    fs::create_dir_all(kept.parent().unwrap_or(&kept)).expect("a folder of the build");
    host::store::write(&kept, ptx.as_bytes()).unwrap_or_else(|error| panic!("{error}"));
    Some(ptx)
}

/// PTX with names of files that do not depend on the machine.
pub fn portable(ptx: &str) -> String {
    let folder = folder();
    let absolute = fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone());
    let names = [folder, absolute].map(|folder| folder.display().to_string());
    let text = ptx.trim_end_matches('\0').to_owned();
    names.iter().fold(text, |text, name| text.replace(name.as_str(), "filetests/cuda"))
}

/// The file that keeps the PTX of a source, by the hash of the source, of the headers beside it and of the
/// library's identity.
fn kept(file: &Path, text: &str, library: &Path) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    let identity = fs::metadata(library).ok().map(|found| (found.len(), found.modified().ok()));
    (text, fs::canonicalize(library).ok(), identity).hash(&mut hasher);
    for header in crate::files(file.parent().unwrap_or(file), "cuh") {
        fs::read(header).ok().hash(&mut hasher);
    }
    let program = std::env::current_exe().unwrap_or_default();
    // Test programs are in `deps` of a profile's folder of the build.
    let build = program.ancestors().nth(3).unwrap_or(Path::new("target")).to_path_buf();
    build.join("tmp/nvrtc").join(format!("{}-{:016x}.ptx", crate::stem(file), hasher.finish()))
}
