//! Tests the pages in a real browser: headless Chromium, driven by Playwright.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{XtaskError, run, target, wheel};

/// The Python packages that drive the browser.
const DRIVER: [&str; 2] = ["playwright==1.65.2", "pytest==9.2.0"];

/// Names of Chromium on PATH. The first one has no window system and is the smallest.
const NAMES: [&str; 6] = [
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
];

/// The package of Chromium in Debian and Ubuntu, and a package of fonts: without fonts a page shows no
/// letters.
const PACKAGES: [&str; 2] = ["chromium-headless-shell", "fonts-liberation"];

/// Builds the command line and the demonstration ledger, and tests the pages that they show. Screenshots go
/// to `target/pages`.
///
/// # Errors
/// The failing command, or that no browser is available.
pub fn test(root: &Path, cargo: impl Fn() -> Command) -> Result<(), XtaskError> {
    let python = driver(root)?;
    let chromium = chromium(root, &python)?;
    // The features of the whole workspace, as for the tests. Other features would compile every crate again.
    run(cargo().args(wheel::CARGO_BUILD).args(["--bin", "flashcore", "--example", "demo_ledger"]))?;
    let target = target(root)?;
    let built = target.join("debug");
    run(Command::new(&python)
        .args(["-m", "pytest", "--quiet", "-p", "no:cacheprovider"])
        .arg(root.join("crates/cli/tests/browser"))
        .current_dir(&target)
        .env("FLASHCORE_BIN", built.join("flashcore"))
        .env("FLASHCORE_DEMO", built.join("examples/demo_ledger"))
        .env("FLASHCORE_CHROMIUM", chromium)
        .env("FLASHCORE_PICTURES", target.join("pages"))
        .env("PYTHONDONTWRITEBYTECODE", "1"))
}

/// A Python environment with the driver, in `.tools/browser`.
fn driver(root: &Path) -> Result<PathBuf, XtaskError> {
    let venv = root.join(".tools/browser");
    let python = venv.join("bin/python");
    let stamp = venv.join("versions");
    let wanted = DRIVER.join("\n");
    if fs::read_to_string(&stamp).ok().as_deref() != Some(&wanted) {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        run(Command::new(&python).args(pip).args(DRIVER))?;
        fs::write(&stamp, &wanted).map_err(|source| XtaskError::Io { path: stamp, source })?;
    }
    Ok(python)
}

/// A Chromium: the one that `FLASHCORE_CHROMIUM` names, else one on PATH, else Playwright's own in
/// `.tools/chromium`. If there is none, one is installed from the system's packages where that is allowed,
/// else by Playwright.
fn chromium(root: &Path, python: &Path) -> Result<PathBuf, XtaskError> {
    let folder = root.join(".tools/chromium");
    if let Some(named) = std::env::var_os("FLASHCORE_CHROMIUM") {
        return Ok(named.into());
    }
    if let Some(found) = on_path().or_else(|| fetched(&folder)) {
        return Ok(found);
    }
    let installed = by_packages().or_else(|error| {
        eprintln!("xtask: {error}");
        let mut install = Command::new(python);
        install.args(["-m", "playwright", "install", "chromium-headless-shell"]);
        run(install.env("PLAYWRIGHT_BROWSERS_PATH", &folder))
    });
    let found = on_path().or_else(|| fetched(&folder));
    found.ok_or_else(|| {
        let why = installed.err().map_or_else(|| "it was installed and is not found".to_owned(), |e| e.to_string());
        XtaskError::Check(format!(
            "no Chromium for the browser test: {why}; install one (Debian: apt-get install {}), or name one with FLASHCORE_CHROMIUM",
            PACKAGES.join(" ")
        ))
    })
}

fn on_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    NAMES.iter().find_map(|name| folders.iter().map(|f| f.join(name)).find(|p| p.is_file()))
}

/// The browser that Playwright has fetched into a folder.
fn fetched(folder: &Path) -> Option<PathBuf> {
    let mut open = vec![folder.to_path_buf()];
    while let Some(dir) = open.pop() {
        for path in fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            if path.is_dir() {
                open.push(path);
            } else if ["headless_shell", "chrome-headless-shell"].contains(&name) {
                return Some(path);
            }
        }
    }
    None
}

fn by_packages() -> Result<(), XtaskError> {
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").args(["-qq", "-o", "Dpkg::Use-Pty=0"]);
        command
    };
    run(apt().arg("update"))?;
    run(apt().args(["install", "-y", "--no-install-recommends"]).args(PACKAGES))
}
