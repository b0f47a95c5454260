//! Runs NVIDIA's compute-sanitizer on this program with a short list of cases, once for each of its tools.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Check, Making};
use check::gate::Verdict;
use host::store::Scratch;

pub const TOOLS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];

/// The sanitizer's exit code for findings.
const FOUND: i32 = 99;

/// The sanitizer's program: `FLASHCORE_SANITIZER` if set, else on the path, else in the toolkit's folder.
pub fn find() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("FLASHCORE_SANITIZER") {
        return Some(PathBuf::from(path)).filter(|path| path.is_file());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let roots = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let roots = roots.chain(["/usr/local/cuda".into(), "/opt/cuda".into()]);
    let folders = std::env::split_paths(&path)
        .chain(roots.flat_map(|root| [root.join("bin"), root.join("compute-sanitizer")]));
    folders.map(|folder| folder.join("compute-sanitizer")).find(|path| path.is_file())
}

/// One check per tool. `child` is the program with the arguments for the short list.
pub fn sanitize(child: &[&std::ffi::OsStr], limit: Duration, progress: &mut dyn FnMut(&Check)) -> Vec<Check> {
    let program = find();
    let checks = TOOLS.into_iter().map(|tool| {
        let mut making = Making::new("sanitizer", tool);
        match &program {
            Some(program) => one(program, tool, child, limit, &mut making),
            None => making.find(Verdict::Incomplete, "compute-sanitizer is not installed".to_owned()),
        }
        let check = making.done();
        progress(&check);
        check
    });
    checks.collect()
}

fn one(program: &Path, tool: &str, child: &[&std::ffi::OsStr], limit: Duration, making: &mut Making) {
    let mut command = Command::new(program);
    command.args(["--tool", tool, "--error-exitcode", &FOUND.to_string(), "--print-limit", "20"]);
    // PTX must be compiled again: code in a disk cache was compiled without the sanitizer.
    command.args(child).env("CUDA_CACHE_DISABLE", "1");
    match run(command, limit) {
        Ok(Ended { code: None, .. }) => {
            making.find(Verdict::Incomplete, format!("stopped after {} s", limit.as_secs()));
        }
        Ok(Ended { code: Some(code), text }) => {
            making.check.cases = 1;
            judge(code, &text, making);
        }
        Err(error) => making.find(Verdict::Incomplete, format!("{}: {error}", program.display())),
    }
}

/// Judges the exit code and the summary.
fn judge(code: i32, text: &str, making: &mut Making) {
    match (findings(text), code) {
        (Some(0), 0) => {}
        (Some(0) | None, code) if code != FOUND => {
            let last =
                text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing was printed");
            making.find(Verdict::Incomplete, format!("no clean end (exit code {code}): {last}"));
        }
        (count, _) => {
            let count = count.map_or_else(|| "some".to_owned(), |n| n.to_string());
            making.fail(format!("{count} errors"));
            let told = text.lines().filter_map(|line| line.strip_prefix("========= "));
            let told = told.filter(|line| {
                let begins =
                    !line.starts_with(' ') && !line.contains("SUMMARY") && !line.contains("SANITIZER");
                // A hazard has two lines; other indented lines are the host's backtrace.
                begins && !line.trim().is_empty() || line.trim_start().starts_with("and ")
            });
            told.take(6).for_each(|line| making.fail(line.trim().to_owned()));
        }
    }
}

/// Errors by the last summary: `ERROR SUMMARY: 0 errors`, or
/// `RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)`. Warnings count as well.
fn findings(text: &str) -> Option<u64> {
    let line = text.lines().rev().find(|line| line.contains("SUMMARY:"))?;
    let (_, counts) = line.split_once("SUMMARY:")?;
    counts.split_whitespace().next()?.parse().ok()
}

/// The end of a process.
struct Ended {
    /// The exit code; `None` when the process was stopped, −1 when a signal ended it.
    code: Option<i32>,
    text: String,
}

/// Runs a command for at most `limit`.
fn run(mut command: Command, limit: Duration) -> std::io::Result<Ended> {
    let scratch = Scratch::new().map_err(std::io::Error::other)?;
    let path = scratch.path("output");
    // Output goes to a file, because a full pipe would block the process.
    let output = File::create(&path)?;
    let errors = output.try_clone()?;
    let mut child = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn()?;
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if start.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
    Ok(Ended { code: status.map(|status| status.code().unwrap_or(-1)), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n";
    const RACES: &str = "========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at fused+0x10
=========     and Read access at fused+0x20
=========
========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)
";

    fn verdict(code: i32, text: &str) -> Check {
        let mut making = Making::new("sanitizer", "test");
        making.check.cases = 1;
        judge(code, text, &mut making);
        making.done()
    }

    #[test]
    fn summaries() {
        assert_eq!(findings(CLEAN), Some(0));
        assert_eq!(findings(RACES), Some(3));
        assert_eq!(findings("nothing"), None);
        assert_eq!(verdict(0, CLEAN).verdict, Verdict::Passed);
        let races = verdict(FOUND, RACES);
        assert_eq!(races.verdict, Verdict::Failed);
        let told = [
            "3 errors",
            "Error: Race reported between Write access at fused+0x10",
            "and Read access at fused+0x20",
        ];
        assert_eq!(races.notes, told);
        assert_eq!(verdict(0, RACES).verdict, Verdict::Failed, "warnings do not change the exit code");
        // The child failed although the sanitizer found nothing, or the sanitizer could not start.
        assert_eq!(verdict(1, CLEAN).verdict, Verdict::Incomplete);
        assert_eq!(verdict(127, "cannot start\n").notes, ["no clean end (exit code 127): cannot start"]);
    }

    #[test]
    fn a_process_that_hangs_is_stopped() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo begun; sleep 60"]);
        let ended = run(command, Duration::from_millis(300)).unwrap();
        assert_eq!((ended.code, ended.text.as_str()), (None, "begun\n"));
        let mut command = Command::new("sh");
        command.args(["-c", "echo done >&2; exit 7"]);
        let ended = run(command, Duration::from_secs(20)).unwrap();
        assert_eq!((ended.code, ended.text.as_str()), (Some(7), "done\n"));
    }
}
