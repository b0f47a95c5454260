//! Builds the Python wheel with maturin, and checks its size, its platform tag and its tests.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::notices::{self, Linked};
use crate::{XtaskError, evidence, run, target};

/// Packages that build and check the wheel. The tests compare with NumPy and ml_dtypes, and Ray distributes
/// an evolution over machines.
const BUILD: [&str; 9] = [
    "maturin==1.16.0",
    // A C toolchain that links for an older glibc than this machine's.
    "ziglang==0.17.1",
    "pytest==9.2.0",
    "numpy==2.4.6",
    "ml_dtypes==0.6.0",
    "ruff==0.17.5",
    "mypy==2.4.1",
    "ray==2.60.0",
    // Builds the wheel of `flashcore-check`, which is Python alone.
    "flit-core==4.2.0",
];
/// Packages that the tests of PyTorch tensors need in addition. PyTorch brings the CUDA libraries: about 5
/// GB, and Triton, whose kernels `flashcore-check` runs. Models of transformers are compared with their eager
/// attention.
const TORCH: [&str; 6] = [
    "torch==2.15.0",
    "pytest==9.2.0",
    "numpy==2.4.6",
    "ml_dtypes==0.6.0",
    "transformers==5.23.0",
    "pytest-xdist==3.8.0",
];
/// Packages beside these whose launches `flashcore-check` runs in the emulator.
const LAUNCHING: [&str; 6] = [
    "numba-cuda==0.30.4",
    "nvidia-cuda-nvcc==13.2.*",
    "cupy-cuda13x==14.2.0",
    "cuda-core==1.2.2",
    "nvidia-cutlass-dsl==4.8.*",
    "apache-tvm-ffi",
];
/// The tests of `flashcore-check` on these packages. Elsewhere they are skipped.
const LAUNCHING_TESTS: [&str; 4] = ["test_numba.py", "test_cupy.py", "test_cuda_python.py", "test_cute.py"];
/// pytest as pure Python wheels, for a GPU machine without a network.
const CARRIED: [&str; 5] = ["pytest==9.2.0", "iniconfig", "pluggy", "packaging", "pygments"];

/// Features of the whole workspace: those of the wheel and of the command with the search. All builds of
/// `xtask` that share a target folder use them, so that each crate is compiled once.
pub const ALL: &str = "flashcore-python/evolve,search";
/// Arguments of a build with the features of the whole workspace.
pub const CARGO_BUILD: [&str; 5] = ["build", "--quiet", "--workspace", "--features", ALL];

/// A wheel with an extension module.
#[derive(Clone, Copy, Debug)]
pub struct Extension {
    pub linked: Linked,
    /// The name under which Python imports the package.
    package: &'static str,
    /// The folder of its tests.
    tests: &'static str,
    /// The largest accepted release, bytes.
    largest: u64,
}

/// The ordinary wheel, for attention. The distribution is `flashcore-attn`: `flashcore` on the package index
/// belongs to another project.
pub const ATTENTION: Extension = Extension {
    linked: Linked { package: "flashcore-python", features: "", folder: "python" },
    package: "flashcore_attn",
    tests: "python/tests",
    largest: 4_000_000,
};
/// The wheel that also has the search, for `flashcore_attn.ray`: with SQLite and Parquet.
pub const SEARCH: Extension = Extension {
    linked: Linked { features: "flashcore-python/evolve", ..ATTENTION.linked },
    largest: 10_000_000,
    ..ATTENTION
};
/// The wheel of the benchmark.
pub const BENCH: Extension = Extension {
    linked: Linked { package: "flashcore-python-bench", features: "", folder: "python/bench" },
    package: "flashcore_bench",
    tests: "python/tests/bench",
    largest: 6_000_000,
};
/// The wheel of the benchmark with the libraries of the workspace's tests.
const TESTED_BENCH: Extension =
    Extension { linked: Linked { features: "flashcore-python-bench/shared", ..BENCH.linked }, ..BENCH };

/// The newest glibc that a released wheel may require: that of RHEL 8 and of PyTorch's wheels. A wheel for
/// the tests is linked by this machine's own linker, for its own glibc.
const NEWEST_GLIBC: (u32, u32) = (2, 28);
/// The options that link a wheel for that glibc.
const PORTABLE: [&str; 3] = ["--zig", "--compatibility", "manylinux_2_28"];

/// Builds a wheel in release mode into `target/wheels`, and puts its tests and the packages that they need
/// next to it.
///
/// # Errors
/// When a build fails, or the wheel is too large or not portable.
pub fn release(root: &Path, extension: Extension) -> Result<(), XtaskError> {
    let python = environment(root)?;
    let out = root.join("target/wheels");
    // A wheel that does not know its commit cannot write evidence with `python -m flashcore_bench`.
    let commit = evidence::commit(root);
    if let Err(error) = &commit {
        eprintln!("xtask: this wheel writes no evidence: {error}");
    }
    let mut options = vec!["--release", "--strip"];
    if cfg!(target_os = "linux") {
        options.extend(PORTABLE);
    }
    let wheel = build(root, &python, &out, &options, extension, commit.ok().as_deref())?;
    run(pip(&python)
        .args(["download", "--no-deps", "--only-binary", ":all:", "--dest"])
        .arg(&out)
        .args(CARRIED))?;
    let tests = out.join("tests");
    let io = |source| XtaskError::Io { path: tests.clone(), source };
    fs::create_dir_all(&tests).map_err(io)?;
    for entry in fs::read_dir(root.join(extension.tests)).map_err(io)?.flatten() {
        if entry.path().extension().is_some_and(|e| e == "py") {
            fs::copy(entry.path(), tests.join(entry.file_name())).map_err(io)?;
        }
    }
    println!("{}", wheel.display());
    Ok(())
}

/// The largest accepted wheel of the command, bytes.
const LARGEST_COMMAND: u64 = 20_000_000;

/// Builds the wheel of the command into `target/wheels`, installs it into a separate virtual environment and
/// runs it there. The command is several times as large as the library, so it has a separate wheel.
///
/// # Errors
/// When a build fails, the wheel is too large or not portable, or the command does not start.
pub fn command(root: &Path) -> Result<(), XtaskError> {
    let python = environment(root)?;
    let out = root.join("target/wheels/command");
    let io = |source| XtaskError::Io { path: out.clone(), source };
    if out.exists() {
        fs::remove_dir_all(&out).map_err(io)?;
    }
    notices::write(root, notices::COMMAND)?;
    let mut maturin = Command::new(&python);
    maturin.current_dir(root).env("PATH", first_in_path(&python)?);
    maturin.env("FLASHCORE_COMMIT", evidence::commit(root).unwrap_or_default());
    maturin.args(["-m", "maturin", "build", "--quiet", "--locked", "--profile", "dist", "--strip"]);
    maturin.args(["--manifest-path", "crates/cli/Cargo.toml", "--out"]).arg(&out);
    if cfg!(target_os = "linux") {
        maturin.args(PORTABLE);
    }
    run(&mut maturin)?;
    let wheel = fs::read_dir(&out).map_err(io)?.flatten().map(|entry| entry.path()).next();
    let wheel =
        wheel.ok_or_else(|| XtaskError::Check(format!("maturin left no wheel in {}", out.display())))?;
    let bytes = fs::metadata(&wheel).map_err(io)?.len();
    eprintln!("xtask: {}, {:.1} MB", wheel.display(), bytes as f64 / 1e6);
    if bytes > LARGEST_COMMAND {
        let most = format!("at most {LARGEST_COMMAND} are accepted");
        return Err(XtaskError::Check(format!("{} has {bytes} bytes; {most}", wheel.display())));
    }
    notices::check(root, &python, &wheel, notices::COMMAND)?;
    let folder = out.join("try");
    run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    run(pip(&folder.join("bin/python")).args(["install", "--no-index"]).arg(&wheel))?;
    run(Command::new(folder.join("bin/flashcore")).args(["version"]))?;
    println!("{}", wheel.display());
    println!("{}", plugin(root)?.display());
    Ok(())
}

/// Builds the wheel of the pytest plugin `flashcore-check`, which depends on that of the command, into
/// `target/wheels/check`.
///
/// # Errors
/// When the build fails, or the wheel has another version than the command.
fn plugin(root: &Path) -> Result<PathBuf, XtaskError> {
    let python = environment(root)?;
    let out = root.join("target/wheels/check");
    if out.exists() {
        fs::remove_dir_all(&out).map_err(|source| XtaskError::Io { path: out.clone(), source })?;
    }
    let wheel = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"];
    run(pip(&python).args(wheel).arg(&out).arg(root.join("python/check")))?;
    let version = env!("CARGO_PKG_VERSION");
    let wheel = out.join(format!("flashcore_check-{version}-py3-none-any.whl"));
    if !wheel.exists() {
        let manifest = root.join("python/check/pyproject.toml");
        return Err(XtaskError::Check(format!("{}: expected version {version}", manifest.display())));
    }
    Ok(wheel)
}

/// Lints the packages, builds their wheels in the profile of `cargo test` (a quick build), installs them and
/// runs their tests. The tests of PyTorch tensors and those of `flashcore-check` run in an environment with
/// PyTorch.
///
/// # Errors
/// When a command fails.
pub fn test(root: &Path) -> Result<(), XtaskError> {
    let python = environment(root)?;
    let package = root.join("python");
    let tool = |name: &str| {
        let mut command = Command::new(&python);
        command.current_dir(&package).args(["-m", name]);
        command
    };
    let linted = ["--quiet", "--config", "pyproject.toml", ".", "../bridges", "../xtask/sanitizer"];
    run(tool("ruff").args(["format", "--check"]).args(linted))?;
    run(tool("ruff").arg("check").args(linted))?;
    run(tool("mypy").args(["--no-error-summary", "flashcore_attn", "bench/flashcore_bench"]))?;
    run(tool("mypy").args(["--no-error-summary", "check/flashcore_check"]))?;
    run(tool("mypy").args([
        "--no-error-summary",
        "--python-version",
        "3.11",
        "../xtask/sanitizer/compare.py",
    ]))?;
    let out = root.join("target/wheels/dev");
    let quick = |extension| build(root, &python, &out, &["--profile", "dev"], extension, None);
    let wheels = [quick(SEARCH)?, quick(TESTED_BENCH)?];
    install(&python, &wheels)?;
    pytest(root, &python, &[package.join("tests"), root.join("xtask/sanitizer")])?;
    let python = torch(root)?;
    install(&python, &wheels)?;
    pytest(root, &python, &[package.join("tests")])?;
    test_plugin(root, &python, &[package.join("check/tests")])
}

/// Runs the tests of `flashcore-check` on packages whose launches it catches, in an environment with all of
/// them.
///
/// # Errors
/// When a command fails.
pub fn scheduled(root: &Path) -> Result<(), XtaskError> {
    let packages = [&TORCH[..], &LAUNCHING].concat();
    let python = installed(&root.join(".tools/launching"), &[], &packages)?;
    let folder = root.join("python/check/tests");
    test_plugin(root, &python, &LAUNCHING_TESTS.map(|name| folder.join(name)))
}

/// Installs `flashcore-check`, builds the command, and runs tests of the plugin.
fn test_plugin(root: &Path, python: &Path, tests: &[PathBuf]) -> Result<(), XtaskError> {
    install(python, &[plugin(root)?])?;
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).args(CARGO_BUILD);
    run(command.args(["--bin", "flashcore"]))?;
    let mut pytest = Command::new(python);
    pytest.current_dir(root.join("target")).env("FLASHCORE_COMMAND", target(root)?.join("debug/flashcore"));
    run(pytest.args(["-m", "pytest", "--quiet"]).args(tests))
}

fn install(python: &Path, wheels: &[PathBuf]) -> Result<(), XtaskError> {
    run(pip(python).args(["install", "--no-index", "--no-deps", "--force-reinstall"]).args(wheels))
}

/// Runs tests of the installed package from a folder that does not contain the package.
fn pytest(root: &Path, python: &Path, tests: &[PathBuf]) -> Result<(), XtaskError> {
    let mut pytest = Command::new(python);
    run(pytest.current_dir(root.join("target")).args(["-m", "pytest", "--quiet"]).args(tests))
}

/// Builds into `out`, removes other wheels of the package there, and checks the result.
fn build(
    root: &Path,
    python: &Path,
    out: &Path,
    options: &[&str],
    extension: Extension,
    commit: Option<&str>,
) -> Result<PathBuf, XtaskError> {
    let io = |source| XtaskError::Io { path: out.to_owned(), source };
    let wheels = || -> std::io::Result<Vec<PathBuf>> {
        let all = fs::read_dir(out)?.flatten().map(|entry| entry.path());
        let is_ours = |name: &OsStr| name.to_string_lossy().starts_with(&format!("{}-", extension.package));
        let ours = |p: &PathBuf| p.file_name().is_some_and(is_ours);
        Ok(all.filter(ours).collect())
    };
    fs::create_dir_all(out).map_err(io)?;
    for old in wheels().map_err(io)? {
        fs::remove_file(old).map_err(io)?;
    }
    notices::write(root, extension.linked)?;
    let mut maturin = Command::new(python);
    maturin
        .current_dir(root)
        // Set to nothing, the variable would have cargo compile what depends on it again.
        .envs(commit.map(|commit| ("FLASHCORE_COMMIT", commit)))
        // `--zig` looks for a `python3` that has the package ziglang.
        .env("PATH", first_in_path(python)?)
        .args(["-m", "maturin", "build", "--quiet", "--locked"]);
    maturin.arg("--manifest-path").arg(Path::new(extension.linked.folder).join("Cargo.toml"));
    run(maturin.arg("--out").arg(out).args(options).args(["--features", extension.linked.features]))?;
    let wheel = wheels().map_err(io)?.pop();
    let wheel =
        wheel.ok_or_else(|| XtaskError::Check(format!("maturin left no wheel in {}", out.display())))?;
    check(&wheel, options.contains(&"--release").then_some(extension.largest))?;
    notices::check(root, python, &wheel, extension.linked)?;
    Ok(wheel)
}

/// PATH with the folder of a program in front.
fn first_in_path(program: &Path) -> Result<OsString, XtaskError> {
    let own = program.parent().map(Path::to_path_buf);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = own.into_iter().chain(std::env::split_paths(&path));
    std::env::join_paths(folders).map_err(|error| XtaskError::Check(format!("PATH: {error}")))
}

/// Checks the platform tag of a wheel, and that it has at most `largest` bytes.
fn check(wheel: &Path, largest: Option<u64>) -> Result<(), XtaskError> {
    let name = wheel.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let bytes =
        fs::metadata(wheel).map_err(|source| XtaskError::Io { path: wheel.to_owned(), source })?.len();
    // maturin reads the versions of all symbols and chooses the oldest tag that allows them.
    let glibc = manylinux(&name);
    eprintln!("xtask: {name}, {:.1} MB", bytes as f64 / 1e6);
    if !name.contains("-abi3-") {
        return Err(XtaskError::Check(format!("{name} is built for one Python only; expected abi3")));
    }
    if cfg!(target_os = "linux") && largest.is_some() && glibc.is_none_or(|version| version > NEWEST_GLIBC) {
        let (major, minor) = NEWEST_GLIBC;
        return Err(XtaskError::Check(format!("{name} needs a glibc newer than {major}.{minor}")));
    }
    if let Some(largest) = largest.filter(|&largest| bytes > largest) {
        return Err(XtaskError::Check(format!("{name} has {bytes} bytes; at most {largest} are accepted")));
    }
    Ok(())
}

/// The glibc version that a wheel's name requires: (2, 34) for `manylinux_2_34`.
fn manylinux(name: &str) -> Option<(u32, u32)> {
    let (_, rest) = name.split_once("manylinux_")?;
    let mut parts = rest.split('_');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The virtual environment under `.tools/` that builds the wheel. It contains the packages of the system's
/// Python.
fn environment(root: &Path) -> Result<PathBuf, XtaskError> {
    installed(&root.join(".tools/python"), &["--system-site-packages"], &BUILD)
}

/// The virtual environment under `.tools/` that has PyTorch.
///
/// # Errors
/// When PyTorch cannot be installed. Skipping its tests would look like passing them.
pub fn torch(root: &Path) -> Result<PathBuf, XtaskError> {
    let folder = root.join(".tools/torch");
    installed(&folder, &[], &TORCH).map_err(|error| {
        let missing =
            format!("{error}; the tests of PyTorch's tensors need {} in {}", TORCH[0], folder.display());
        XtaskError::Check(format!("{missing}, from the package index and with 6 GB of room"))
    })
}

/// A virtual environment with these packages. Each list of packages is installed once.
///
/// # Errors
/// When a package cannot be installed.
pub fn installed(folder: &Path, options: &[&str], packages: &[&str]) -> Result<PathBuf, XtaskError> {
    let (python, stamp) = (folder.join("bin/python"), folder.join("versions"));
    let wanted = packages.join("\n");
    if fs::read_to_string(&stamp).ok().as_deref() != Some(&wanted) {
        run(Command::new("python3").args(["-m", "venv"]).args(options).arg(folder))?;
        run(pip(&python).arg("install").args(packages))?;
        fs::write(&stamp, &wanted).map_err(|source| XtaskError::Io { path: stamp, source })?;
    }
    Ok(python)
}

fn pip(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_wheels() {
        assert_eq!(manylinux("flashcore_attn-0.1.0-cp39-abi3-manylinux_2_34_x86_64.whl"), Some((2, 34)));
        assert_eq!(manylinux("flashcore_attn-0.1.0-cp39-abi3-linux_x86_64.whl"), None);
    }

    #[test]
    fn packages_that_cannot_be_had_are_an_error() {
        let folder = std::env::temp_dir().join(format!("flashcore-venv-{}", std::process::id()));
        let packages = ["flashcore-no-such-package @ file:///nonexistent.whl"];
        assert!(installed(&folder, &["--without-pip"], &packages).is_err());
        assert!(!folder.join("versions").exists(), "the next run tries again");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("versions"), packages.join("\n")).unwrap();
        assert!(installed(&folder, &[], &packages).is_ok(), "installed before");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_wheel_of_one_python_or_a_new_system_is_refused() {
        let folder = std::env::temp_dir().join(format!("flashcore-wheel-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let refused = |name: &str| {
            let wheel = folder.join(name);
            fs::write(&wheel, b"wheel").unwrap();
            check(&wheel, Some(ATTENTION.largest)).is_err()
        };
        assert!(!refused("flashcore_attn-0.1.0-cp39-abi3-manylinux_2_17_x86_64.whl"));
        assert!(refused("flashcore_attn-0.1.0-cp312-cp312-manylinux_2_17_x86_64.whl"));
        assert_eq!(
            refused("flashcore_attn-0.1.0-cp39-abi3-manylinux_2_39_x86_64.whl"),
            cfg!(target_os = "linux")
        );
        fs::remove_dir_all(&folder).unwrap();
    }
}
