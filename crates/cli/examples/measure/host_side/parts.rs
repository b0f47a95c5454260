//! Runs the parts as processes.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bench::{median, quantile};
use host::store::{Scratch, append_line};
use kernels::Family;
use serde_json::{Value, json};

use super::{CACHED, CHILD, COMPILED, Outcome};

/// The word that precedes a measurement in the output of a program.
pub const MEASURE: &str = "MEASURE ";
/// Number of processes that start with an empty cache (`COLD`) and with a full one (`WARM`).
const COLD: usize = 3;
const WARM: usize = 5;
/// Number of processes that share an empty cache.
const TOGETHER: usize = 4;

/// The results of the parts.
#[derive(Debug, Default)]
pub struct Found {
    pub passed: u32,
    /// Checks that failed, with their findings.
    pub failed: Vec<String>,
    pub measures: Vec<Value>,
}

impl Found {
    fn tell(&mut self, line: &str) {
        match line.strip_prefix("FAIL ") {
            Some(why) => self.failed.push(why.to_owned()),
            None => self.passed += 1,
        }
        println!("{line}");
    }

    fn check(&mut self, name: &str, holds: bool, detail: &str) {
        self.tell(&format!("{} {name}: {detail}", if holds { "PASS" } else { "FAIL" }));
    }

    /// Adds a measurement with all its samples.
    fn measure(&mut self, name: &str, unit: &str, samples: &[f64]) {
        self.measures.push(json!({
            "measure": name, "unit": unit, "median": median(samples),
            "p99": quantile(samples, 0.99), "samples": samples,
        }));
    }
}

pub fn all(found: &mut Found, log: &Path) -> Outcome {
    let scratch = Scratch::new()?;
    let mut cold = Vec::new();
    for i in 0..COLD {
        cold.extend(first(found, log, &scratch.path(&format!("cold-{i}")), "cold")?);
    }
    let folder = scratch.path("cold-0");
    let mut warm = Vec::new();
    for _ in 0..WARM {
        warm.extend(first(found, log, &folder, "warm")?);
    }
    starts(found, "cold", &cold, |s| s["stored"] == 1 && s["hits"] == 0);
    starts(found, "warm", &warm, |s| s["hits"] == 1 && s["stored"] == 0);
    cache(found, log, &scratch)?;
    loads(found, log, &scratch)?;
    for (part, seconds) in [
        ("calls", 60),
        ("numbers", 120),
        ("interface", 60),
        ("refusals", 60),
        ("streams", 120),
        ("fault", 60),
    ] {
        let told = start(part, &folder)?.finish(Duration::from_secs(seconds), log)?;
        take(found, part, &told);
    }
    Ok(())
}

/// Starts one process and returns its cache statistics and times.
fn first(found: &mut Found, log: &Path, folder: &Path, name: &str) -> Outcome<Option<Value>> {
    let told = start("first", folder)?.finish(Duration::from_secs(60), log)?;
    Ok(take(found, &format!("first result, {name} cache"), &told).into_iter().next())
}

fn starts(found: &mut Found, name: &str, all: &[Value], cached: impl Fn(&Value) -> bool) {
    let samples =
        |field: &str| -> Vec<f64> { all.iter().filter_map(|start| start[field].as_f64()).collect() };
    if all.is_empty() {
        return;
    }
    found.measure(&format!("open driver and context, {name} cache"), "ms", &samples("context_ms"));
    found.measure(&format!("context to prepared kernel, {name} cache"), "ms", &samples("prepare_ms"));
    found.measure(&format!("context to first result, {name} cache"), "ms", &samples("first_ms"));
    let stats = all.iter().all(|start| cached(&start["cache"]));
    found.check(&format!("{name} cache was {name}"), stats, &all[0]["cache"].to_string());
}

/// Loads each family's kernels in processes with an initially empty cache: FlashCore's, and the driver's for
/// programs that it loads whole.
fn loads(found: &mut Found, log: &Path, scratch: &Scratch) -> Outcome {
    for family in Family::of_pass(problem::PassKind::Forward) {
        let folder = scratch.path(&format!("loads-{}", family.name()));
        for (when, processes) in [(COMPILED, 1), (CACHED, WARM)] {
            let (mut name, mut samples) = (String::new(), Vec::new());
            for _ in 0..processes {
                let part = format!("{when}:{}", family.name());
                let child = Part::start(&part, &folder, DriverCache::At(&folder.join("driver")))?;
                let told = child.finish(Duration::from_secs(90), log)?;
                take(found, &part, &told);
                let lines = told.stdout.lines().filter_map(|line| line.strip_prefix("LOADS "));
                for loads in lines.filter_map(|text| serde_json::from_str::<Value>(text).ok()) {
                    name = loads["measure"].as_str().unwrap_or_default().to_owned();
                    samples
                        .extend(loads["samples"].as_array().into_iter().flatten().filter_map(Value::as_f64));
                }
            }
            if !samples.is_empty() {
                found.measure(&name, "ms", &samples);
            }
        }
    }
    Ok(())
}

/// Tests of the cache: damaged files, a folder that is not writable, processes that start together.
fn cache(found: &mut Found, log: &Path, scratch: &Scratch) -> Outcome {
    let folder = scratch.path("damaged");
    for (name, damage) in
        [("torn file", Damage::Tear), ("flipped bit", Damage::Flip), ("empty file", Damage::Empty)]
    {
        first(found, log, &folder, "fresh")?;
        spoil(&folder, damage)?;
        let stats = stats_of(first(found, log, &folder, name)?);
        found.check(name, stats["damaged"] == 1 && stats["stored"] == 1, &stats.to_string());
        let stats = stats_of(first(found, log, &folder, "mended")?);
        found.check(&format!("{name}, mended"), stats["hits"] == 1, &stats.to_string());
    }
    let stats = stats_of(first(found, log, Path::new("/proc/flashcore"), "unwritable")?);
    found.check("folder that cannot be written", stats["unwritable"] == 1, &stats.to_string());
    let folder = scratch.path("together");
    let children: Vec<Part> = (0..TOGETHER).map(|_| start("first", &folder)).collect::<Outcome<_>>()?;
    for child in children {
        let told = child.finish(Duration::from_secs(90), log)?;
        take(found, "processes that start together", &told);
    }
    Ok(())
}

/// The cache statistics of a start.
fn stats_of(start: Option<Value>) -> Value {
    start.map_or(Value::Null, |start| start["cache"].clone())
}

#[derive(Clone, Copy)]
enum Damage {
    Tear,
    Flip,
    Empty,
}

fn spoil(folder: &Path, damage: Damage) -> Outcome {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let mut bytes = fs::read(&path)?;
        let middle = bytes.len() / 2;
        match damage {
            Damage::Tear => bytes.truncate(middle),
            Damage::Flip => bytes[middle] ^= 0x10,
            Damage::Empty => bytes.clear(),
        }
        fs::write(&path, bytes)?;
    }
    Ok(())
}

/// Counts the verdicts of a part and adds its measurements to `found`. Returns its start times.
fn take(found: &mut Found, part: &str, told: &Told) -> Vec<Value> {
    let mut starts = Vec::new();
    let mut verdicts = 0;
    for line in told.stdout.lines() {
        if let Some(text) = line.strip_prefix("START ") {
            starts.extend(serde_json::from_str::<Value>(text));
        } else if let Some(text) = line.strip_prefix(MEASURE) {
            found.measures.extend(serde_json::from_str::<Value>(text));
        } else if line.starts_with("PASS ") || line.starts_with("FAIL ") {
            verdicts += 1;
            found.tell(line);
        }
    }
    if !told.ended_well || verdicts == 0 {
        let last = told.stderr.lines().last().unwrap_or("nothing was told");
        found.tell(&format!("FAIL {part}: {}: {last}", told.end));
    }
    starts
}

/// A running part.
struct Part {
    child: Child,
    name: String,
}

/// The output of a part.
struct Told {
    stdout: String,
    stderr: String,
    /// How the part ended, in words.
    end: String,
    ended_well: bool,
}

/// Starts a part with FlashCore's cache in a folder and without the driver's, which would make a cold start
/// warm.
fn start(part: &str, folder: &Path) -> Outcome<Part> {
    Part::start(part, folder, DriverCache::Off)
}

/// The driver's own cache.
enum DriverCache<'a> {
    Off,
    At(&'a Path),
}

impl Part {
    fn start(part: &str, folder: &Path, driver: DriverCache) -> Outcome<Part> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["host", CHILD, part]).env("FLASHCORE_CACHE_DIR", folder);
        match driver {
            DriverCache::Off => command.env("CUDA_CACHE_DISABLE", "1"),
            DriverCache::At(place) => command.env("CUDA_CACHE_DISABLE", "0").env("CUDA_CACHE_PATH", place),
        };
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        Ok(Part { child, name: part.to_owned() })
    }

    /// Waits until the part ends, or kills it after `limit`.
    fn finish(mut self, limit: Duration, log: &Path) -> Outcome<Told> {
        let (out, err) = (reader(self.child.stdout.take()), reader(self.child.stderr.take()));
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break Some(status);
            }
            if began.elapsed() > limit {
                self.child.kill()?;
                self.child.wait()?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let text = |reader: std::thread::JoinHandle<String>| reader.join().unwrap_or_default();
        let (stdout, stderr) = (text(out), text(err));
        let end = status.map_or(format!("ended after {} s", limit.as_secs()), |status| status.to_string());
        append_line(log, &format!("== {}: {end}\n{stdout}{stderr}", self.name))?;
        Ok(Told { stdout, stderr, end, ended_well: status.is_some_and(|status| status.success()) })
    }
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // A read error ends the output.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
