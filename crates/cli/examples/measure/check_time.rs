//! Times a whole check: the runs in the emulator, and separately the references of one run. `check_time mma
//! 1,8,4096,64` checks the default plan of a family (`mma` on sm_80, `wgmma` on sm_90a) on f16 inputs;
//! `check_time FILE.ptx FILE.toml` checks a kernel. A further argument `quick` selects the runs of `--quick`,
//! `runs=N` the first N runs, and `--evidence` appends a row to `evidence/emulator.jsonl`.
//! `RAYON_NUM_THREADS=1` uses one core.

use std::path::Path;
use std::time::Instant;

use bench::provenance::Provenance;
use check::gate::{Feed, Settings, bind, check_kernel};
use check::launchfile::{Bound, LaunchSpec};
use host::store;
use judge::inputs::Style;
use kernels::forward::{mma::MmaPlan, wgmma::WgmmaPlan};
use kernels::{Arch, Plan};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use problem::{DType, Problem};
use serde_json::json;

use crate::{Outcome, Usage, with};

type Failure = Box<dyn std::error::Error>;

pub fn main(args: &[String]) -> Outcome {
    let [kind, what, more @ ..] = args else { return Err(Usage.into()) };
    let bound = match kind.as_str() {
        "mma" | "wgmma" => attention(kind, what)?,
        _ => {
            let module = ptx::parse(&std::fs::read_to_string(kind)?).map_err(|e| e.to_string())?;
            let spec: LaunchSpec = std::fs::read_to_string(what)?.parse()?;
            spec.bind(module.verify().map_err(|e| format!("{e:?}"))?)?
        }
    };
    let mut settings = Settings::thorough();
    let mut evidence = false;
    for option in more {
        match option.as_str() {
            "quick" => settings = Settings::quick(),
            "--evidence" => evidence = true,
            _ => {
                settings.runs.truncate(option.strip_prefix("runs=").ok_or(Usage)?.parse()?);
                settings.lagging = false;
            }
        }
    }
    let threads = rayon::current_num_threads();
    let provenance = Provenance::of_cpu(Path::new("."), threads);
    if evidence && provenance.commit.is_none() {
        return Err("rows are appended only from a clean commit".into());
    }
    println!("grid {}, {threads} threads", bound.kernel.launch.grid);
    let start = Instant::now();
    if let Some(feed) = Feed::draw(&bound, Style::Normal, 1) {
        let drawn = start.elapsed();
        feed.references(&bound)?;
        let all = start.elapsed();
        println!("inputs {drawn:.1?}, references {:.1?}", all - drawn);
    }
    let (start, busy) = (Instant::now(), busy()?);
    let check = check_kernel(&bound, &settings)?;
    let seconds = start.elapsed().as_secs_f64();
    let busy = self::busy()? - busy;
    // Of one run, in warp instructions.
    let counters = &check.counters.instructions;
    let accesses: u64 = counters.iter().map(|c| c.shared_accesses + c.global_accesses).sum();
    let issues: u64 = counters.iter().map(|c| c.issues).sum();
    println!(
        "{} after {} runs in {seconds:.1} s ({:.2} s each), {busy:.1} s of user CPU time, {:.1} M warp \
         instructions/s {:?}",
        check.verdict,
        check.runs,
        seconds / f64::from(check.runs.max(1)),
        check.steps as f64 / seconds / 1e6,
        check.reasons
    );
    if evidence {
        let row = json!({
            "suite": "speed", "kernel": kind, "size": what, "options": more, "verdict": check.verdict,
            "runs": check.runs, "seconds": seconds, "cpu_seconds": busy, "steps": check.steps,
            "run_instructions": issues, "run_accesses": accesses,
        });
        store::append_line(Path::new("evidence/emulator.jsonl"), &with(row, &provenance).to_string())?;
    }
    Ok(true)
}

/// The user CPU time of this process, in seconds.
fn busy() -> Result<f64, Failure> {
    Ok(getrusage(UsageWho::RUSAGE_SELF)?.user_time().num_microseconds() as f64 / 1e6)
}

/// The default plan of a family for `B,H,S,D`.
fn attention(family: &str, shape: &str) -> Result<Bound, Failure> {
    let numbers = shape.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let [batch, heads, rows, dim] = numbers[..] else { return Err("expected B,H,S,D".into()) };
    let problem = Problem::new(batch, heads, rows, dim, DType::F16);
    Ok(match family {
        "mma" => bind(&Plan::Mma(MmaPlan::default_for(&problem, &Arch::SM_80)), &problem, &Arch::SM_80)?,
        _ => bind(&Plan::Wgmma(WgmmaPlan::default_for(&problem, &Arch::SM_90)), &problem, &Arch::SM_90)?,
    })
}
