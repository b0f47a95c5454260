//! Checks all crates that FlashCore is built from against `deny.toml`: their licences, their source, and
//! duplicate versions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use spdx::{Expression, Licensee, ParseMode};

use crate::{XtaskError, quoted, run};

/// The parts of `deny.toml` that are checked here.
#[derive(Debug, Deserialize)]
struct Rules {
    graph: Targets,
    licenses: Licenses,
    bans: Bans,
}

#[derive(Debug, Deserialize)]
struct Targets {
    targets: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    skip: Vec<Skip>,
}

/// A version that is allowed in addition to a newer version of the crate.
#[derive(Debug, Deserialize)]
struct Skip {
    /// `name@version`
    #[serde(rename = "crate")]
    name: String,
}

/// A crate, as `cargo metadata` describes it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Package {
    pub name: String,
    pub version: String,
    id: String,
    pub license: Option<String>,
    /// `None` for a crate of the workspace.
    source: Option<String>,
    manifest_path: PathBuf,
    pub authors: Vec<String>,
    targets: Vec<Product>,
}

/// A build target of a crate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
struct Product {
    kind: Vec<String>,
}

/// The output of `cargo metadata`.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

/// `kind` is `None` for a dependency that is linked, else `dev` or `build`.
#[derive(Debug, Deserialize)]
struct Kind {
    kind: Option<String>,
}

impl Package {
    /// `name@version`
    pub fn spec(&self) -> String {
        format!("{}@{}", self.name, self.version)
    }

    /// The folder of the crate's sources.
    pub fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(&self.manifest_path)
    }

    fn is_macro(&self) -> bool {
        self.targets.iter().any(|product| product.kind.iter().any(|kind| kind == "proc-macro"))
    }
}

/// Checks every crate against `deny.toml`, and runs cargo-deny if it is installed.
///
/// # Errors
/// Everything that `deny.toml` does not allow.
pub fn check(root: &Path) -> Result<(), XtaskError> {
    let (rules, mut all) = (rules(root)?, BTreeSet::new());
    for target in &rules.graph.targets {
        let metadata = metadata(root, target, "")?;
        let members = metadata.workspace_members.clone();
        all.extend(reached(&metadata, members, |_, _| true));
    }
    let all: Vec<Package> = all.into_iter().filter(|package| package.source.is_some()).collect();
    let mut faults = licences(&all, &rules.licenses.allow)?;
    faults.extend(sources(&all));
    faults.extend(doubles(&all, &rules.bans.skip));
    if !faults.is_empty() {
        return Err(XtaskError::Check(format!("deny.toml: {}", faults.join("; "))));
    }
    eprintln!("xtask: {} crates are as deny.toml allows", all.len());
    let mut probe = Command::new("cargo-deny");
    probe.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    if probe.status().is_ok_and(|status| status.success()) {
        // The check of advisories is left out, because it needs a database from the network.
        let mut deny = Command::new("cargo-deny");
        run(deny.current_dir(root).args(["--workspace", "check", "licenses", "bans", "sources"]))?;
    }
    Ok(())
}

/// The third-party crates that are linked into the products of a workspace crate with these features, which
/// are a list as cargo takes it.
///
/// # Errors
/// When `cargo metadata` fails.
pub fn linked(root: &Path, name: &str, features: &str) -> Result<Vec<Package>, XtaskError> {
    let mut all = BTreeSet::new();
    for target in &rules(root)?.graph.targets {
        let metadata = metadata(root, target, features)?;
        let begin =
            metadata.packages.iter().filter(|package| package.name == name && package.source.is_none());
        let begin = begin.map(|package| package.id.clone()).collect();
        let is_linked = |dependency: &Dependency, package: &Package| {
            dependency.dep_kinds.iter().any(|kind| kind.kind.is_none()) && !package.is_macro()
        };
        all.extend(reached(&metadata, begin, is_linked));
    }
    Ok(all.into_iter().filter(|package| package.source.is_some()).collect())
}

fn rules(root: &Path) -> Result<Rules, XtaskError> {
    let path = root.join("deny.toml");
    let text =
        std::fs::read_to_string(&path).map_err(|source| XtaskError::Io { path: path.clone(), source })?;
    toml::from_str(&text).map_err(|error| XtaskError::Check(format!("{}: {error}", path.display())))
}

fn metadata(root: &Path, target: &str, features: &str) -> Result<Metadata, XtaskError> {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        target,
        "--features",
        features,
    ]);
    let text = quoted(&command);
    let found = command.output().map_err(|source| XtaskError::Start { command: text.clone(), source })?;
    if !found.status.success() {
        eprint!("{}", String::from_utf8_lossy(&found.stderr));
        return Err(XtaskError::Failed { command: text, status: found.status });
    }
    serde_json::from_slice(&found.stdout).map_err(|error| XtaskError::Check(format!("`{text}`: {error}")))
}

/// The crates that `begin` depends on, directly or indirectly, over the followed kinds of dependencies;
/// `begin` is included.
fn reached(
    metadata: &Metadata,
    mut begin: Vec<String>,
    is_followed: impl Fn(&Dependency, &Package) -> bool,
) -> Vec<Package> {
    let packages: BTreeMap<&str, &Package> = metadata.packages.iter().map(|p| (p.id.as_str(), p)).collect();
    let nodes: BTreeMap<&str, &Node> = metadata.resolve.nodes.iter().map(|n| (n.id.as_str(), n)).collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = begin.pop() {
        let Some(node) = nodes.get(id.as_str()).filter(|_| seen.insert(id.clone())) else { continue };
        let next = node.deps.iter().filter(|dependency| {
            packages.get(dependency.pkg.as_str()).is_some_and(|package| is_followed(dependency, package))
        });
        begin.extend(next.map(|dependency| dependency.pkg.clone()));
    }
    seen.iter().filter_map(|id| packages.get(id.as_str()).copied().cloned()).collect()
}

/// Crates without a licence that is allowed.
fn licences(all: &[Package], allowed: &[String]) -> Result<Vec<String>, XtaskError> {
    let parse = |name: &String| {
        Licensee::parse(name)
            .map_err(|error| XtaskError::Check(format!("deny.toml: {name:?}: {}", error.reason)))
    };
    let allowed = allowed.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    let is_allowed = |expression: &str| {
        Expression::parse_mode(expression, ParseMode::LAX).is_ok_and(|found| {
            found.evaluate(|needed| allowed.iter().any(|licence| licence.satisfies(needed)))
        })
    };
    let refused = all.iter().filter(|package| !package.license.as_deref().is_some_and(is_allowed));
    Ok(refused
        .map(|p| format!("{} has the licence {:?}", p.spec(), p.license.as_deref().unwrap_or("none")))
        .collect())
}

/// Crates from any source other than the one registry.
fn sources(all: &[Package]) -> Vec<String> {
    let of = |package: &Package| package.source.clone().unwrap_or_default();
    let registry = all.iter().map(of).find(|source| source.starts_with("registry+")).unwrap_or_default();
    let strange = all.iter().filter(|package| of(package) != registry);
    strange.map(|package| format!("{} comes from {}", package.spec(), of(package))).collect()
}

/// Older versions of crates that occur more than once and are not listed, and listed versions that need no
/// entry any more.
fn doubles(all: &[Package], skip: &[Skip]) -> Vec<String> {
    let listed: BTreeSet<String> = skip.iter().map(|skip| skip.name.clone()).collect();
    let mut older = BTreeSet::new();
    for package in all {
        let versions: Vec<&Package> = all.iter().filter(|other| other.name == package.name).collect();
        if versions.iter().any(|other| number(&other.version) > number(&package.version)) {
            older.insert(package.spec());
        }
    }
    let missing = older.difference(&listed).map(|spec| format!("{spec} is there beside a newer version"));
    let stale =
        listed.difference(&older).map(|spec| format!("[[bans.skip]] {spec} is no older version any more"));
    missing.chain(stale).collect()
}

/// A version as numbers. The part after a + or - does not count.
fn number(version: &str) -> Vec<u64> {
    let plain = version.split(['+', '-']).next().unwrap_or_default();
    plain.split('.').filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, version: &str, license: Option<&str>, source: &str) -> Package {
        Package {
            name: name.into(),
            version: version.into(),
            id: format!("{name} {version}"),
            license: license.map(str::to_owned),
            source: Some(source.into()),
            manifest_path: PathBuf::new(),
            authors: Vec::new(),
            targets: Vec::new(),
        }
    }

    #[test]
    fn a_licence_must_be_allowed() {
        let allowed =
            ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Unicode-3.0"].map(str::to_owned);
        let faults = |license| licences(&[package("a", "1.0.0", license, "registry+x")], &allowed).unwrap();
        for license in [
            "MIT",
            "MIT/GPL-3.0",
            "(MIT OR ISC) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception",
            "Zlib OR MIT",
        ] {
            assert!(faults(Some(license)).is_empty(), "{license}");
        }
        for license in [None, Some("GPL-3.0-only"), Some("MIT AND ISC"), Some("no such licence")] {
            assert_eq!(faults(license).len(), 1, "{license:?}");
        }
    }

    #[test]
    fn a_crate_comes_from_the_registry() {
        let all = |source| [package("a", "1.0.0", None, "registry+x"), package("b", "1.0.0", None, source)];
        assert!(sources(&all("registry+x")).is_empty());
        for source in ["git+https://example.org/b", "registry+y"] {
            assert_eq!(sources(&all(source)), [format!("b@1.0.0 comes from {source}")]);
        }
    }

    #[test]
    fn an_older_version_is_listed_with_a_reason() {
        let all = ["1.9.0", "1.10.0"].map(|version| package("a", version, None, "registry+x"));
        let skip =
            |specs: &[&str]| specs.iter().map(|name| Skip { name: (*name).into() }).collect::<Vec<_>>();
        assert_eq!(doubles(&all, &skip(&[])), ["a@1.9.0 is there beside a newer version"]);
        assert!(doubles(&all, &skip(&["a@1.9.0"])).is_empty());
        let stale = doubles(&all, &skip(&["a@1.9.0", "b@2.0.0"]));
        assert_eq!(stale, ["[[bans.skip]] b@2.0.0 is no older version any more"]);
    }
}
