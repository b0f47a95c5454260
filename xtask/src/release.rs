//! The command `cargo xtask release`: checks everything that a release consists of, and builds it into
//! `target/dist`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::{XtaskError, evidence, run, target, wheel};

#[derive(clap::Args)]
pub struct Release {
    /// Check and build everything, also from changed files, and make no tag
    #[arg(long)]
    dry_run: bool,
}

/// The largest accepted binary, bytes, without debug information.
const LARGEST: u64 = 20_000_000;
/// Files that are packed with the binary into its archive, relative to the root.
const BESIDE: [&str; 4] = ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"];

/// Checks versions, changelog and packages, and builds the wheel and the archive of the command. Then tags
/// the commit, unless this is a dry run. Publishing is left to the workflow that the tag starts.
///
/// # Errors
/// When a part of the release is missing or a command fails.
pub fn release(root: &Path, args: &Release) -> Result<(), XtaskError> {
    let packages = packages(root)?;
    let version = version(&packages)?;
    let faults = faults(&packages);
    if !faults.is_empty() {
        return Err(XtaskError::Check(faults.join("\n")));
    }
    let read = |name: &str| {
        let path = root.join(name);
        fs::read_to_string(&path).map_err(|source| XtaskError::Io { path, source })
    };
    if notes(&read("CHANGELOG.md")?, &version).is_none() {
        return Err(XtaskError::Check(format!("CHANGELOG.md has no text below `## {version}`")));
    }
    if !read("python/bench/pyproject.toml")?.contains(&format!("\"flashcore-attn=={version}\"")) {
        let expected = format!("expected the dependency flashcore-attn=={version}");
        return Err(XtaskError::Check(format!("python/bench/pyproject.toml: {expected}")));
    }
    let runs_in = std::env::var("GITHUB_REPOSITORY").ok().map(|name| {
        let server = std::env::var("GITHUB_SERVER_URL").unwrap_or_else(|_| "https://github.com".to_owned());
        format!("{server}/{name}")
    });
    let stated = PROJECTS.map(|file| read(file).map(|text| (file, text)));
    let stated = stated.into_iter().collect::<Result<Vec<_>, _>>()?;
    addresses(&packages, &stated, runs_in.as_deref())?;
    let tag = format!("v{version}");
    let (commit, dirty) = match evidence::commit(root) {
        Ok(commit) => (commit, None),
        Err(changes) if args.dry_run => {
            eprintln!("xtask: a release would refuse this: {changes}");
            (String::new(), Some("--allow-dirty"))
        }
        Err(changes) => return Err(changes),
    };
    let tags = evidence::git(root, &["tag", "--list", &tag])?;
    if !args.dry_run && !tags.is_empty() {
        return Err(XtaskError::Check(format!("the tag {tag} exists; raise the version in Cargo.toml")));
    }
    publish(root, &packages, dirty)?;
    wheel::release(root, wheel::ATTENTION)?;
    wheel::release(root, wheel::BENCH)?;
    wheel::command(root)?;
    let archive = command(root, &version, &commit)?;
    println!("{}", archive.display());
    if args.dry_run {
        eprintln!("xtask: {tag} could be released");
        return Ok(());
    }
    run(Command::new("git").current_dir(root).args(["tag", "--annotate", &tag, "--message"]).arg(&tag))?;
    eprintln!("xtask: `git push origin {tag}` starts the workflow that publishes");
    Ok(())
}

/// The metadata of the Python packages, relative to the root.
const PROJECTS: [&str; 4] = [
    "python/pyproject.toml",
    "python/bench/pyproject.toml",
    "python/check/pyproject.toml",
    "crates/cli/pyproject.toml",
];

/// Checks that crates and wheels state one address of the repository, and that it is the one from which the
/// release runs.
fn addresses(
    packages: &[Package],
    projects: &[(&str, String)],
    runs_in: Option<&str>,
) -> Result<(), XtaskError> {
    let address = packages.iter().find_map(|package| package.repository.as_deref()).unwrap_or_default();
    let line = format!("Repository = \"{address}\"");
    if let Some((file, _)) = projects.iter().find(|(_, text)| !text.contains(&line)) {
        return Err(XtaskError::Check(format!("{file}: expected the line `{line}`, as in Cargo.toml")));
    }
    match runs_in.filter(|runs_in| *runs_in != address) {
        None => Ok(()),
        Some(runs_in) => Err(XtaskError::Check(format!(
            "Cargo.toml: repository is {address}, and this release runs from {runs_in}: state that address in Cargo.toml \
             and in {}",
            PROJECTS.join(", ")
        ))),
    }
}

/// Packs and compiles every published crate as the registry would, in the order of their dependencies.
///
/// `cargo publish --workspace --dry-run` passes crates to each other through a local registry. Cargo takes a
/// version in a registry for immutable, so it would use what it unpacked and compiled in an earlier run.
fn publish(root: &Path, packages: &[Package], dirty: Option<&str>) -> Result<(), XtaskError> {
    let build = target(root)?.join("publish");
    remove(&build)?;
    remove_unpacked(packages)?;
    let mut publish = Command::new(env!("CARGO"));
    publish.current_dir(root).args(["publish", "--workspace", "--dry-run", "--locked", "--target-dir"]);
    run(publish.arg(&build).args(dirty))?;
    remove(&build)
}

/// Removes the sources of these crates that cargo unpacked from local registries. The name of such a
/// registry's folder starts with a dash because the registry has no host.
fn remove_unpacked(packages: &[Package]) -> Result<(), XtaskError> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let Some(home) = home.or_else(|| Some(std::env::home_dir()?.join(".cargo"))) else { return Ok(()) };
    let Ok(registries) = fs::read_dir(home.join("registry/src")) else { return Ok(()) };
    let local = registries.flatten().filter(|of| of.file_name().as_encoded_bytes().starts_with(b"-"));
    for registry in local {
        for Package { name, version, .. } in packages {
            remove(&registry.path().join(format!("{name}-{version}")))?;
        }
    }
    Ok(())
}

/// Removes a folder if it exists.
fn remove(folder: &Path) -> Result<(), XtaskError> {
    match fs::remove_dir_all(folder) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(XtaskError::Io { path: folder.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Packs the command of this commit only.
///
/// # Errors
/// A build that fails, or a binary that is too large.
pub fn binary(root: &Path) -> Result<(), XtaskError> {
    let commit = evidence::commit(root).unwrap_or_default();
    let archive = command(root, &version(&packages(root)?)?, &commit)?;
    println!("{}", archive.display());
    Ok(())
}

/// A crate of the workspace, as `cargo metadata` describes it.
#[derive(Clone, Debug, Default, Deserialize)]
struct Package {
    name: String,
    version: String,
    description: Option<String>,
    license: Option<String>,
    readme: Option<PathBuf>,
    repository: Option<String>,
    rust_version: Option<String>,
    keywords: Vec<String>,
    categories: Vec<String>,
    /// The registries that it may be published to; `None` for all, empty for none.
    publish: Option<Vec<String>>,
    dependencies: Vec<Dependency>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Dependency {
    name: String,
    req: String,
    /// `Some` for a crate of the workspace.
    path: Option<PathBuf>,
    /// `dev` for a dependency of tests.
    kind: Option<String>,
}

/// The crates of the workspace.
fn packages(root: &Path) -> Result<Vec<Package>, XtaskError> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).args(["metadata", "--format-version", "1", "--no-deps", "--locked"]);
    let found = command.output();
    let found = found.map_err(|source| XtaskError::Start { command: "cargo metadata".into(), source })?;
    let metadata: Metadata = serde_json::from_slice(&found.stdout)
        .map_err(|error| XtaskError::Check(format!("cargo metadata: {error}")))?;
    Ok(metadata.packages)
}

/// The version that all crates have.
fn version(packages: &[Package]) -> Result<String, XtaskError> {
    let Some(first) = packages.first() else {
        return Err(XtaskError::Check("the workspace has no crates".to_owned()));
    };
    match packages.iter().find(|package| package.version != first.version) {
        None => Ok(first.version.clone()),
        Some(other) => Err(XtaskError::Check(format!(
            "{} has version {}, and {} has {}; expected one version",
            first.name, first.version, other.name, other.version
        ))),
    }
}

/// What the manifests of published crates lack, one line per fault.
fn faults(packages: &[Package]) -> Vec<String> {
    let is_published = |package: &&Package| package.publish.as_ref().is_none_or(|to| !to.is_empty());
    packages.iter().filter(is_published).flat_map(lacks).collect()
}

fn lacks(package: &Package) -> Vec<String> {
    let name = &package.name;
    let fields = [
        ("description", package.description.is_some()),
        ("license", package.license.is_some()),
        ("readme", package.readme.is_some()),
        ("repository", package.repository.is_some()),
        ("rust-version", package.rust_version.is_some()),
        ("keywords", !package.keywords.is_empty()),
        ("categories", !package.categories.is_empty()),
    ];
    let missing = fields.into_iter().filter(|(_, is_there)| !is_there);
    let mut faults: Vec<String> = missing
        .map(|(field, _)| format!("{name}: no {field}; expected `{field}.workspace = true`"))
        .collect();
    // cargo leaves a test's dependency without a version out of the package.
    let inner = package.dependencies.iter().filter(|d| d.path.is_some() && d.kind.as_deref() != Some("dev"));
    for dependency in inner.filter(|d| !d.req.ends_with(package.version.as_str())) {
        let Dependency { name: on, req, .. } = dependency;
        faults.push(format!("{name}: {on} is required as {req}; expected version {}", package.version));
    }
    faults
}

/// The text of a version in the changelog, from its heading to the next one.
fn notes<'t>(changelog: &'t str, version: &str) -> Option<&'t str> {
    let heading =
        |line: &str| line.strip_prefix("## ").map(|rest| rest.split_whitespace().next() == Some(version));
    let mut start = None;
    let mut at = 0;
    for line in changelog.split_inclusive('\n') {
        match (heading(line), start) {
            (Some(true), _) => start = Some(at + line.len()),
            (Some(false), Some(from)) => {
                return Some(changelog[from..at].trim()).filter(|text| !text.is_empty());
            }
            _ => {}
        }
        at += line.len();
    }
    start.map(|from| changelog[from..].trim()).filter(|text| !text.is_empty())
}

/// Builds the command without debug information and packs it with its manual pages and completions.
fn command(root: &Path, version: &str, commit: &str) -> Result<PathBuf, XtaskError> {
    let mut build = Command::new(env!("CARGO"));
    build.current_dir(root).env("FLASHCORE_COMMIT", commit).args(["build", "--profile", "dist", "--locked"]);
    run(build.args(["--package", "flashcore-cli", "--bin", "flashcore", "--features", "search"]))?;
    let binary = target(root)?.join("dist/flashcore");
    let io = |path: &Path| {
        let path = path.to_path_buf();
        |source| XtaskError::Io { path, source }
    };
    let bytes = fs::metadata(&binary).map_err(io(&binary))?.len();
    eprintln!("xtask: {}, {:.1} MB", binary.display(), bytes as f64 / 1e6);
    if bytes > LARGEST {
        return Err(XtaskError::Check(format!(
            "the command has {bytes} bytes; at most {LARGEST} are accepted"
        )));
    }
    let name = format!("flashcore-{version}-{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    let out = root.join("target/dist");
    let folder = out.join(&name);
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(io(&folder))?;
    }
    let completions = folder.join("completions");
    fs::create_dir_all(&completions).map_err(io(&completions))?;
    fs::copy(&binary, folder.join("flashcore")).map_err(io(&binary))?;
    for file in BESIDE {
        fs::copy(root.join(file), folder.join(file)).map_err(io(&root.join(file)))?;
    }
    run(Command::new(&binary).args(["man", "--out"]).arg(folder.join("man")))?;
    for (shell, file) in [("bash", "flashcore.bash"), ("zsh", "_flashcore"), ("fish", "flashcore.fish")] {
        let script = Command::new(&binary).args(["completions", shell]).output().map_err(io(&binary))?;
        fs::write(completions.join(file), script.stdout).map_err(io(&completions))?;
    }
    let archive = format!("{name}.tar.gz");
    run(Command::new("tar").current_dir(&out).args(["-czf", &archive, &name]))?;
    Ok(out.join(archive))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_states_the_address_from_which_it_runs() {
        let package = Package { repository: Some("https://host/a/b".into()), ..Package::default() };
        let text = |address: &str| ("p.toml", format!("[project.urls]\nRepository = \"{address}\"\n"));
        let told = |projects: &[(&str, String)], runs_in: Option<&str>| {
            addresses(std::slice::from_ref(&package), projects, runs_in).map_err(|error| error.to_string())
        };
        let good = [text("https://host/a/b")];
        assert_eq!((told(&good, None), told(&good, Some("https://host/a/b"))), (Ok(()), Ok(())));
        assert!(told(&good, Some("https://host/c/d")).unwrap_err().contains("runs from https://host/c/d"));
        assert!(told(&[text("https://host/c/d")], None).unwrap_err().contains("p.toml: expected the line"));
    }

    #[test]
    fn this_workspace_can_be_published() {
        let packages = packages(&crate::root()).unwrap();
        assert_eq!(faults(&packages), Vec::<String>::new());
        let version = version(&packages).unwrap();
        let changelog = fs::read_to_string(crate::root().join("CHANGELOG.md")).unwrap();
        assert!(notes(&changelog, &version).is_some(), "{version}");
        let bench = fs::read_to_string(crate::root().join("python/bench/pyproject.toml")).unwrap();
        assert!(bench.contains(&format!("\"flashcore-attn=={version}\"")), "{version}");
    }

    #[test]
    fn what_a_manifest_lacks_is_named() {
        let inner = Dependency { name: "b".into(), req: "^0.1.0".into(), path: Some("b".into()), kind: None };
        let bare = Package {
            name: "a".into(),
            version: "0.2.0".into(),
            dependencies: vec![inner],
            ..Package::default()
        };
        let said = faults(std::slice::from_ref(&bare));
        assert_eq!(said.len(), 8, "{said:?}");
        assert!(said.contains(&"a: b is required as ^0.1.0; expected version 0.2.0".to_owned()), "{said:?}");
        let kept = Package { publish: Some(Vec::new()), ..bare };
        assert_eq!(faults(&[kept]), Vec::<String>::new());
    }

    #[test]
    fn the_notes_of_a_version() {
        let changelog = "# Changelog\n\n## 0.2.0\n\nNew.\n\n## 0.1.0 (2026-01-01)\n\nFirst.\n\n## 0.0.9\n";
        assert_eq!(notes(changelog, "0.2.0"), Some("New."));
        assert_eq!(notes(changelog, "0.1.0"), Some("First."));
        assert_eq!((notes(changelog, "0.0.9"), notes(changelog, "0.3.0")), (None, None));
    }
}
