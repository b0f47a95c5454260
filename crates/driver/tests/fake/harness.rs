//! Runs scenarios of a test program in processes that use the fake CUDA driver, because a process loads its
//! driver once. Each test program that uses this harness has a test named `scenario`, which runs the scenario
//! that [`SCENARIO`] names.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The environment variable that names the scenario.
pub const SCENARIO: &str = "FLASHCORE_TEST_SCENARIO";

/// A temporary folder, removed when dropped.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("flashcore-fake-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The folder of the fake driver's library, which is compiled once. `lacking` leaves one function out.
fn library(lacking: bool) -> PathBuf {
    static BUILT: OnceLock<[PathBuf; 2]> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        [("whole", None), ("lacking", Some("lacking"))].map(|(name, cfg)| {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
            std::fs::create_dir_all(&folder).unwrap();
            for (source, name) in [("libcuda.rs", "libcuda.so.1"), ("libnccl.rs", "libnccl.so.2")] {
                let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
                rustc.args(["--edition", "2024", "--crate-type", "cdylib", "--check-cfg", "cfg(lacking)"]);
                rustc.arg("-o").arg(folder.join(name));
                rustc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../driver/tests/fake").join(source));
                rustc.args(cfg.iter().flat_map(|cfg| ["--cfg", cfg]));
                assert!(rustc.status().unwrap().success());
            }
            folder
        })
    });
    built[usize::from(lacking)].clone()
}

/// Runs a scenario; `cache` is the folder of its cubins.
pub fn run(scenario: &str, lacking: bool, cache: &Path, variables: &[(&str, &str)]) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "scenario", "--nocapture"]).env(SCENARIO, scenario);
    child.env("LD_LIBRARY_PATH", library(lacking)).env("FLASHCORE_CACHE_DIR", cache);
    child.envs(variables.iter().copied());
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{scenario}: {text}{}", String::from_utf8_lossy(&output.stdout));
}

/// Runs scenarios at the same time, each with its own cache. `all` are variables of every scenario.
///
/// # Panics
/// With the names of the scenarios that fail.
pub fn all_pass(all: &[(&str, &str)], scenarios: &[(&str, &[(&str, &str)])]) {
    let next = AtomicUsize::new(0);
    let passes = |index: usize, scenario: &str, variables: &[(&str, &str)]| {
        let folder = Folder::new(&format!("{scenario}-{index}"));
        run(scenario, false, &folder.0, &[all, variables].concat());
    };
    let work = || {
        let mut failed = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(scenario, variables)) = scenarios.get(index) else { return failed };
            if catch_unwind(AssertUnwindSafe(|| passes(index, scenario, variables))).is_err() {
                failed.push(scenario);
            }
        }
    };
    let failed: Vec<&str> = std::thread::scope(|scope| {
        let workers = std::thread::available_parallelism().map_or(2, usize::from);
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert!(failed.is_empty(), "failed: {failed:?}");
}
