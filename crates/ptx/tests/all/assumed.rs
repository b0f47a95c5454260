//! `Module::assume_verified` is for code that shows the emulator ill-formed kernels on purpose: mutants,
//! fuzzing and the emulator's own tests.

use std::path::{Path, PathBuf};

/// The files that use it, and the file of its definition.
const USERS: [&str; 13] = [
    "crates/calibrate/src/fuzz/mod.rs",
    "crates/check/src/gate/mutate.rs",
    "crates/check/tests/all/verdicts.rs",
    "crates/emu/tests/all/contract.rs",
    "crates/emu/tests/all/limits.rs",
    "crates/emu/tests/filetests.rs",
    "crates/kernels/tests/all/forward.rs",
    "crates/kernels/tests/all/small_needed.rs",
    "crates/kernels/tests/all/wgmma_needed.rs",
    "crates/kernels/tests/all/wgmma_tail.rs",
    "crates/predict/src/tests/asynchronous.rs",
    "crates/ptx/src/verify/mod.rs",
    "crates/ptx/tests/all/assumed.rs",
];

#[test]
fn few_files_avoid_the_verifier() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut users = Vec::new();
    for folder in ["crates", "python", "xtask"] {
        collect(&root, Path::new(folder), &mut users);
    }
    users.sort();
    assert_eq!(users, USERS.map(PathBuf::from));
}

/// The Rust files under a folder that name the function.
fn collect(root: &Path, folder: &Path, users: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(root.join(folder)).expect("a folder of the repository") {
        let entry = entry.expect("an entry of the folder");
        let path = folder.join(entry.file_name());
        if entry.file_type().expect("its type").is_dir() {
            if entry.file_name() != "target" {
                collect(root, &path, users);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(root.join(&path)).expect("a text");
            if text.contains("assume_verified") {
                users.push(path);
            }
        }
    }
}
