//! The origin of a figure: commit, device, clocks, compiler and time.

use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use sha2::{Digest, Sha256};

/// The provenance that is stored with each measured figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Provenance {
    /// The processor's name as the system reports it, with the number of cores used.
    pub device: String,
    /// The system's name and release; for a GPU, the CUDA version of the driver.
    pub driver: String,
    /// Mean clock of the cores at the start, MHz; 0 when it was not read.
    pub clocks_mhz: f64,
    /// The compiler of the native kernels; for a GPU, the driver's JIT.
    pub compiler: String,
    /// The commit; `None` outside a repository or with uncommitted changes.
    pub commit: Option<String>,
    /// An identifier that the rows of one run share.
    pub run: String,
    pub when: String,
}

/// The compiler that built this program.
pub const RUSTC: &str = env!("FLASHCORE_RUSTC");

/// The commit from which `cargo xtask evidence` or a release built this program; `None` for another build.
pub fn built_from() -> Option<&'static str> {
    Some(env!("FLASHCORE_COMMIT")).filter(|commit| !commit.is_empty())
}

impl Provenance {
    /// The provenance of this process on a GPU. The commit is the one that `cargo xtask evidence` built.
    pub fn of_gpu(device: &driver::DeviceInfo) -> Provenance {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Provenance {
            device: device.name.clone(),
            driver: format!("CUDA {}.{}", device.driver / 1000, device.driver % 1000 / 10),
            clocks_mhz: 0.0,
            compiler: "driver JIT".to_owned(),
            commit: built_from().map(str::to_owned),
            run: hash(format!("{}-{}", now.as_nanos(), std::process::id()).as_bytes()),
            when: iso8601(now.as_secs()),
        }
    }

    /// The provenance of this process on this machine; `root` is a folder of the repository. The commit is
    /// the one that `cargo xtask evidence` built, if the repository is there. For any other build it is the
    /// repository's commit, if the work tree is clean.
    pub fn of_cpu(root: &Path, threads: usize) -> Provenance {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let lines = cpuinfo.lines().filter(move |l| l.starts_with(name)).map(str::to_owned);
            lines.filter_map(|l| l.split_once(':').map(|(_, v)| v.trim().to_owned())).collect::<Vec<_>>()
        };
        let clocks: Vec<f64> = field("cpu MHz").iter().filter_map(|v| v.parse().ok()).collect();
        let name = field("model name").first().cloned().unwrap_or_else(|| std::env::consts::ARCH.to_owned());
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Provenance {
            device: format!("{name}, {threads} threads"),
            driver: format!("{} {}", std::env::consts::OS, release.trim()),
            clocks_mhz: (clocks.iter().sum::<f64>() / clocks.len().max(1) as f64).round(),
            compiler: RUSTC.to_owned(),
            commit: commit(env!("FLASHCORE_COMMIT"), root),
            run: hash(format!("{}-{}", now.as_nanos(), std::process::id()).as_bytes()),
            when: iso8601(now.as_secs()),
        }
    }
}

/// The first 12 hexadecimal digits of the SHA-256 digest.
pub fn hash(data: &[u8]) -> String {
    Sha256::digest(data).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

/// The commit of a program: `built`, or where `built` is empty, the commit of a repository without
/// uncommitted changes. Rows that the program itself appends to `evidence/` do not count as changes.
/// Otherwise a run could write a single row only.
fn commit(built: &str, root: &Path) -> Option<String> {
    let git = |folder: &Path, args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(folder).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let head = git(root, &["rev-parse", "--short=12", "HEAD"]);
    if !built.is_empty() {
        // The repository's evidence must not contain rows of another commit. Outside a repository, the commit
        // of the build is used.
        return head.is_none_or(|head| head == built).then(|| built.to_owned());
    }
    let top = git(root, &["rev-parse", "--show-toplevel"])?;
    let changes = git(Path::new(&top), &["status", "--porcelain", "--", ".", ":(exclude)evidence"])?;
    head.filter(|_| changes.is_empty())
}

/// A hash that identifies this build of the program: the length and modification time of its executable.
pub fn program() -> Option<String> {
    let about = std::fs::metadata(std::env::current_exe().ok()?).ok()?;
    let built = about.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(hash(format!("{} {}", about.len(), built.as_nanos()).as_bytes()))
}

/// The current time, UTC, ISO 8601.
pub fn iso8601_now() -> String {
    iso8601(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// Formats seconds since 1970 as `YYYY-MM-DDTHH:MM:SSZ` (days to civil date after H. Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms").
pub fn iso8601(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_the_one_that_was_built() {
        let scratch = host::store::Scratch::new().unwrap();
        let root = scratch.path("");
        assert_eq!(commit("", &root), None, "no repository");
        assert_eq!(commit("0123456789ab", &root).as_deref(), Some("0123456789ab"));
        let git = |args: &[&str]| {
            let name = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"];
            let ended = Command::new("git").arg("-C").arg(&root).args(name).args(args).output().unwrap();
            assert!(ended.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ended.stderr));
            String::from_utf8_lossy(&ended.stdout).trim().to_owned()
        };
        std::fs::create_dir_all(root.join("evidence")).unwrap();
        std::fs::create_dir(root.join("inner")).unwrap();
        git(&["init", "--quiet"]);
        git(&["commit", "--quiet", "--allow-empty", "-m", "first"]);
        let head = git(&["rev-parse", "--short=12", "HEAD"]);
        std::fs::write(root.join("evidence/cpu.jsonl"), "a row").unwrap();
        assert_eq!(commit("", &root.join("inner")), Some(head.clone()));
        assert_eq!(commit(&head, &root), Some(head.clone()));
        assert_eq!(commit("0123456789ab", &root), None, "another one's evidence");
        // A change anywhere in the repository counts.
        std::fs::write(root.join("changed"), "").unwrap();
        assert_eq!(commit("", &root.join("inner")), None);
        assert_eq!(commit(&head, &root), Some(head));
    }

    #[test]
    fn dates() {
        assert_eq!(iso8601(0), "1970-01-01T00:00:00Z");
        assert_eq!(iso8601(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(iso8601(1_795_239_122), "2026-11-21T05:32:02Z");
    }
}
