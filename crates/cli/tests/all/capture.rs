//! The command `capture` on a program that uses the CUDA driver, which is a fake without a GPU.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::folder::{Folder, text};

const HERE: &str = env!("CARGO_MANIFEST_DIR");
const KERNELS: &str = include_str!("../capture/kernels.ptx");

fn compile(source: &Path, to: &Path, options: &[&str]) {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition", "2024", "--check-cfg", "cfg(lacking,linked)"]).args(options);
    let compiled = rustc.arg("-o").arg(to).arg(source).output().unwrap();
    assert!(compiled.status.success(), "{}", text(&compiled.stderr));
}

/// The folder of the fake driver, and the program that links with the driver and the one that does not.
fn built() -> &'static (PathBuf, PathBuf, PathBuf) {
    static BUILT: OnceLock<(PathBuf, PathBuf, PathBuf)> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capture");
        std::fs::create_dir_all(&folder).unwrap();
        let driver = folder.join("libcuda.so.1");
        let fake = Path::new(HERE).join("../driver/tests/fake/libcuda.rs");
        compile(&fake, &driver, &["--crate-type", "cdylib", "-C", "link-arg=-Wl,-soname,libcuda.so.1"]);
        let source = Path::new(HERE).join("tests/capture/program.rs");
        let (linked, loose) = (folder.join("linked"), folder.join("loose"));
        let link = format!("link-arg={}", driver.display());
        compile(&source, &linked, &["--cfg", "linked", "-C", &link]);
        compile(&source, &loose, &[]);
        (folder, linked, loose)
    })
}

/// Captures launches of the program, whose folder has the kernels.
fn capture(folder: &Folder, options: &[&str], way: &str, what: &str, variables: &[(&str, &str)]) -> Output {
    let (driver, linked, loose) = built();
    folder.write("kernels.ptx", KERNELS);
    let program = if way == "linked" { linked } else { loose };
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    command.arg("capture").args(options).arg("--").arg(program).args([way, what]);
    command.current_dir(&folder.0).env("LD_LIBRARY_PATH", driver).env("HOME", &folder.0);
    command.env_remove("TRITON_CACHE_DIR").envs(variables.iter().copied()).output().unwrap()
}

/// Checks a captured launch in another place, without the driver.
fn check(folder: &Folder, launch: &str) -> Output {
    let (kernel, launch) =
        (format!("captured/{launch}/kernel.ptx"), format!("captured/{launch}/launch.toml"));
    folder.run(&["check", &kernel, "--launch", &launch, "--quick"])
}

fn said(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn a_race_is_found_in_a_captured_launch_however_the_program_finds_the_driver() {
    for way in ["linked", "dlsym", "proc"] {
        let folder = Folder::new(way);
        let captured = capture(&folder, &["--kernel", "sum", "--at", "3"], way, "sums", &[]);
        assert_eq!(captured.status.code(), Some(0), "{way}: {}", said(&captured));
        let printed = text(&captured.stdout);
        assert!(
            printed.starts_with("captured sum, launch 3: 3 buffers, 400 bytes\n  flashcore check "),
            "{printed}"
        );
        let launch = std::fs::read_to_string(folder.0.join("captured/sum-3/launch.toml")).unwrap();
        for part in ["plus = 4\n", "value = 3.0\n", "block = [32, 1, 1]", "addresses = [{ at = 8, of = \"m"] {
            assert!(launch.contains(part), "{part}\n{launch}");
        }
        assert_eq!(folder.names().len(), 2, "{:?}", folder.names());
        let checked = check(&folder, "sum-3");
        assert_eq!(checked.status.code(), Some(1), "{launch}{}", said(&checked));
        assert!(text(&checked.stdout).contains("race"), "{}", said(&checked));
    }
}

#[test]
fn results_are_judged_by_those_of_the_gpu() {
    let folder = Folder::new("after");
    let captured = capture(&folder, &["--kernel", "store", "--after"], "dlsym", "store", &[]);
    assert_eq!(captured.status.code(), Some(0), "{}", said(&captured));
    let checked = check(&folder, "store-1");
    assert_eq!(checked.status.code(), Some(0), "{}", said(&checked));
    // Another result of the GPU at the stored word.
    let file = folder.0.join("captured/store-1/m0.after.npy");
    let mut bytes = std::fs::read(&file).unwrap();
    assert_eq!(bytes[128..132], [1, 0, 0, 0]);
    bytes[128] = 2;
    std::fs::write(&file, bytes).unwrap();
    let checked = check(&folder, "store-1");
    assert_eq!(checked.status.code(), Some(1), "{}", said(&checked));
}

#[test]
fn libraries_tensor_maps_and_graphs_are_recorded() {
    let folder = Folder::new("kinds");
    for (what, kernel, verdict) in [("library", "sum", 1), ("map", "first", 0), ("graph", "sum", 1)] {
        let captured = capture(&folder, &["--kernel", kernel], "proc", what, &[]);
        assert_eq!(captured.status.code(), Some(0), "{what}: {}", said(&captured));
        let launch = folder.0.join(format!("captured/{kernel}-1/launch.toml"));
        let launch = std::fs::read_to_string(launch).unwrap();
        let checked = check(&folder, &format!("{kernel}-1"));
        assert_eq!(checked.status.code(), Some(verdict), "{what}: {launch}{}", said(&checked));
        assert_eq!(launch.contains("CUDA graph"), what == "graph", "{launch}");
        assert_eq!(launch.contains("dims = [8, 8]\nstrides = [32]\nbox = [8, 8]"), what == "map", "{launch}");
    }
}

#[test]
fn the_program_can_choose_the_launches() {
    let folder = Folder::new("select");
    let captured = capture(&folder, &[], "dlsym", "select", &[]);
    assert_eq!(captured.status.code(), Some(0), "{}", said(&captured));
    let launch = std::fs::read_to_string(folder.0.join("captured/sum-2/launch.toml")).unwrap();
    assert!(launch.contains("value = 3.0\n"), "{launch}");
    assert_eq!(folder.names().len(), 2);
}

#[test]
fn images_have_ptx_or_their_error_says_why_not() {
    let fatbin =
        |name: &str| std::fs::read(Path::new(HERE).join("../capture/tests/fatbin").join(name)).unwrap();
    let folder = Folder::new("images");
    let with = |image: &[u8], options: &[&str]| {
        std::fs::write(folder.0.join("image"), image).unwrap();
        capture(
            &folder,
            &[&["--kernel", "twice"], options].concat(),
            "dlsym",
            "image",
            &[("FAKE_PARAMS", "1")],
        )
    };
    for name in ["plain.fatbin", "lz4.fatbin", "zstd.fatbin"] {
        let captured = with(&fatbin(name), &[]);
        assert_eq!(captured.status.code(), Some(0), "{name}: {}", said(&captured));
        assert_eq!(check(&folder, "twice-1").status.code(), Some(0), "{name}");
    }
    let captured = with(&fatbin("cubin.fatbin"), &[]);
    assert_eq!(captured.status.code(), Some(2), "{}", said(&captured));
    let words =
        "not captured twice, launch 1: its module is machine code (a cubin) for sm_80 without PTX; neither";
    assert!(text(&captured.stdout).starts_with(words), "{}", said(&captured));
    // The compiler has left the PTX beside an equal cubin, or the user names it.
    let mut cubin = vec![0; 64];
    cubin[..4].copy_from_slice(b"\x7fELF");
    let ptx = include_str!("../../../capture/tests/fatbin/twice.ptx");
    std::fs::create_dir_all(folder.0.join(".triton/cache/key")).unwrap();
    std::fs::write(folder.0.join(".triton/cache/key/twice.cubin"), &cubin).unwrap();
    folder.write(".triton/cache/key/twice.ptx", ptx);
    assert_eq!(with(&cubin, &[]).status.code(), Some(0));
    std::fs::remove_dir_all(folder.0.join(".triton")).unwrap();
    assert_eq!(with(&cubin, &[]).status.code(), Some(2));
    folder.write("other.ptx", &ptx.replace("twice", "thrice"));
    assert_eq!(with(&cubin, &["--ptx", "other.ptx"]).status.code(), Some(2));
    folder.write("right.ptx", ptx);
    assert_eq!(with(&cubin, &["--ptx", "."]).status.code(), Some(0));
    // PTX of another build of the kernel.
    folder.write("right.ptx", &ptx.replace(".param .u64 x", ".param .u32 y, .param .u64 x"));
    let captured = with(&cubin, &["--ptx", "right.ptx"]);
    assert!(text(&captured.stdout).contains("its parameters have [4, 8] bytes, those of the launch [8]"));
}

#[test]
fn launches_that_are_not_there_are_named() {
    let folder = Folder::new("none");
    let captured = capture(&folder, &[], "dlsym", "sums", &[]);
    assert_eq!((captured.status.code(), text(&captured.stdout)), (Some(0), "        3  sum\n".to_owned()));
    for (options, code, words) in [
        (&["--kernel", "mul"][..], 1, "no kernel has 'mul' in its name: the program launched sum"),
        (
            &["--kernel", "sum", "--at", "4,5"],
            1,
            "no launch has a number of --at [4, 5]: sum was launched 3 times",
        ),
        (&["--kernel", "sum", "--limit", "300"], 2, "its memory has 400 bytes or more, and --limit is 300"),
        (&["--at", "3"], 3, "--kernel"),
        (&["--kernel", "sum", "--at", "0"], 3, "--at"),
    ] {
        let captured = capture(&folder, options, "dlsym", "sums", &[]);
        assert_eq!(captured.status.code(), Some(code), "{options:?}: {}", said(&captured));
        assert!(said(&captured).contains(words), "{options:?}: {}", said(&captured));
    }
    let captured = folder.run(&["capture", "--", "/nonexistent/program"]);
    assert_eq!(captured.status.code(), Some(3), "{}", said(&captured));
}

/// The outputs of the command for the test of schemas.
pub fn objects() -> Vec<String> {
    let folder = Folder::new("capture-json");
    let runs =
        [&["--json"][..], &["--json", "--kernel", "sum"], &["--json", "--kernel", "sum", "--limit", "9"]];
    runs.iter().map(|options| text(&capture(&folder, options, "dlsym", "sums", &[]).stdout)).collect()
}
