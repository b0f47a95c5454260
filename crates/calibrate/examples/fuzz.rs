//! Runs [`flashcore_calibrate::fuzz`] for a while: `fuzz [SECONDS] [SEED] [FOLDER]`; or repeats one case:
//! `fuzz replay FILE.ptx`. Failing cases are minimised and written to FOLDER (default `target/fuzz`). The
//! current case is always in `current.ptx` and `current.toml` there, in case it ends the process.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flashcore_calibrate::fuzz::{Campaign, Case, execute, kernels, minimise, tensors};
use host::panics::contain;
use host::store;
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Processor time at which a case counts as slow, which is a bug.
const SLOW: Duration = Duration::from_secs(10);
/// Elapsed time at which a case is stopped, even on a busy machine.
const HANG: Duration = Duration::from_secs(300);
/// Memory limit of the process, bytes: the largest launch that a case may request has 4 GiB of buffers, held
/// twice.
const MEMORY: u64 = 10 << 30;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [replay, file] = &args[..]
        && replay == "replay"
    {
        return replay_case(Path::new(file));
    }
    let number = |i: usize, default: u64| args.get(i).map_or(Ok(default), |a| a.parse());
    let (Ok(seconds), Ok(seed)) = (number(0, 60), number(1, 1)) else {
        eprintln!("usage: fuzz [SECONDS] [SEED] [FOLDER], or fuzz replay FILE.ptx");
        return ExitCode::from(3);
    };
    let folder = PathBuf::from(args.get(2).map_or("target/fuzz", String::as_str));
    match fuzz(Duration::from_secs(seconds), seed, &folder) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fuzz: {error}");
            ExitCode::from(3)
        }
    }
}

/// Repeats one case, `FILE.ptx` with `FILE.toml`. A panic is not caught.
fn replay_case(file: &Path) -> ExitCode {
    let read = |extension| std::fs::read_to_string(file.with_extension(extension));
    match (read("ptx"), read("toml")) {
        (Ok(ptx), Ok(launch)) => {
            let start = Instant::now();
            println!("{:?} after {:.1?}", execute(&Case { ptx, launch }), start.elapsed());
            ExitCode::SUCCESS
        }
        (ptx, toml) => {
            let reason = ptx.err().or(toml.err()).map_or(String::new(), |e| e.to_string());
            eprintln!("fuzz: cannot read {}, .ptx and .toml: {reason}", file.display());
            ExitCode::from(3)
        }
    }
}

fn fuzz(time: Duration, seed: u64, folder: &Path) -> Result<usize, Box<dyn std::error::Error>> {
    std::fs::create_dir_all(folder)?;
    // A single thread leaves the other cores free during hours of fuzzing, and makes runs reproducible.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global()?;
    let seeds = kernels(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests"))?;
    let mut campaign = Campaign::new(seeds, seed);
    let began = Arc::new(Mutex::new(Instant::now()));
    watch(Arc::clone(&began), folder.to_path_buf());
    let start = Instant::now();
    let (mut cases, mut told, mut faults) = (0u64, start, BTreeMap::<String, u64>::new());
    let mut slowest = Duration::ZERO;
    let mut tensor_files = 0u64;
    let files = tensors::files()?;
    let mut rng = SmallRng::seed_from_u64(seed);
    while start.elapsed() < time {
        for file in &files {
            let file = tensors::damaged(&mut rng, file);
            tensor_files += 1;
            if let Err(panic) = tensors::run(&file) {
                let count = faults.entry(panic.place.clone()).or_default();
                *count += 1;
                if *count == 1 {
                    println!("{panic}: fault-{seed}-{tensor_files}-{}", file.name);
                    std::fs::write(
                        folder.join(format!("fault-{seed}-{tensor_files}-{}", file.name)),
                        &file.bytes,
                    )?;
                }
            }
        }
        let case = campaign.next_case();
        save(folder, "current", &case)?;
        *began.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let case_start = processor_time().unwrap_or(start.elapsed());
        let fault = match campaign.run(&case) {
            Err(panic) => Some(panic.to_string()),
            Ok(stage) if taken(case_start, start) > SLOW => Some(format!("slow: {stage:?}")),
            Ok(_) => None,
        };
        let took = taken(case_start, start);
        slowest = slowest.max(took);
        cases += 1;
        if let Some(fault) = fault {
            let place = fault.rsplit_once('(').map_or(fault.clone(), |(_, place)| place.to_owned());
            let count = faults.entry(place).or_default();
            *count += 1;
            if *count == 1 {
                let name = format!("fault-{seed}-{cases}");
                save(folder, &name, &smaller(&case, &fault))?;
                println!("{name}: {} ({:.1?})", fault.chars().take(300).collect::<String>(), took);
            }
        }
        if told.elapsed() > Duration::from_secs(60) {
            told = Instant::now();
            println!("{}", summary(&campaign, cases, tensor_files, start, slowest, &faults));
        }
    }
    println!("{}", summary(&campaign, cases, tensor_files, start, slowest, &faults));
    Ok(faults.len())
}

fn summary(
    campaign: &Campaign,
    cases: u64,
    files: u64,
    start: Instant,
    slowest: Duration,
    faults: &BTreeMap<String, u64>,
) -> String {
    let memory = peak_memory().map_or("?".into(), |bytes| format!("{} MiB", bytes >> 20));
    format!(
        "{:.0} s: {cases} kernels and {files} tensor files, {:?}, {} kinds of answers, slowest {slowest:.1?}, peak memory {memory}, faults {faults:?}",
        start.elapsed().as_secs_f64(),
        campaign.counts,
        campaign.kinds(),
    )
}

/// Removes lines as long as the case panics at the same place. Slow cases are kept whole.
fn smaller(case: &Case, fault: &str) -> Case {
    if fault.starts_with("slow") {
        return case.clone();
    }
    let place = |text: &str| text.rsplit_once('(').map(|(_, place)| place.to_owned());
    let wanted = place(fault);
    minimise(case, 400, |c| contain(|| execute(c)).is_err_and(|panic| place(&panic.to_string()) == wanted))
}

fn save(folder: &Path, name: &str, case: &Case) -> Result<(), store::StoreError> {
    let write = |extension: &str, text: &str| {
        let path = folder.join(format!("{name}.{extension}"));
        std::fs::write(&path, text).map_err(|source| store::StoreError::Write { path, source })
    };
    write("ptx", &case.ptx)?;
    write("toml", &case.launch)
}

/// Ends the process when a case takes too much time or memory. The case is in `current.*`, and a copy is
/// kept.
fn watch(began: Arc<Mutex<Instant>>, folder: PathBuf) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let hung = began.lock().unwrap_or_else(PoisonError::into_inner).elapsed() > HANG;
            let large = memory().is_some_and(|bytes| bytes > MEMORY);
            if hung || large {
                let name = if hung { "hang" } else { "memory" };
                for extension in ["ptx", "toml"] {
                    let from = folder.join(format!("current.{extension}"));
                    // The printed name is valid even if the copy fails, because `current.*` exists.
                    let _ = std::fs::copy(from, folder.join(format!("{name}.{extension}")));
                }
                println!("{name}: see {}/{name}.ptx", folder.display());
                std::process::exit(1);
            }
        }
    });
}

/// Resident memory, bytes (Linux; elsewhere it is not checked).
fn memory() -> Option<u64> {
    status("VmRSS:")
}

fn peak_memory() -> Option<u64> {
    status("VmHWM:")
}

/// Processor time since `before`, or elapsed time where there is no such clock.
fn taken(before: Duration, start: Instant) -> Duration {
    processor_time().unwrap_or(start.elapsed()).saturating_sub(before)
}

/// Processor time of this process, which does not depend on other load (Linux: clock ticks of 10 ms).
fn processor_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // Fields 14 and 15. The name before them, in parentheses, may contain spaces.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11..13)?.iter().filter_map(|f| f.parse::<u64>().ok()).sum();
    Some(Duration::from_millis(10 * ticks))
}

fn status(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}
