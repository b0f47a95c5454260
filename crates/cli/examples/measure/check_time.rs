//! Times a whole check: the runs in the emulator, and separately the references of one run. `check_time mma
//! 1,8,4096,64` checks the default plan of a family (`mma` on sm_80, `wgmma` on sm_90a) on f16 inputs;
//! `check_time FILE.ptx FILE.toml` checks a kernel. A further argument `quick` selects the runs of `--quick`,
//! and `runs=N` the first N runs. `RAYON_NUM_THREADS=1` uses one core.

use std::time::Instant;

use check::gate::{Feed, Settings, bind, check_kernel};
use check::launchfile::{Bound, LaunchSpec};
use judge::inputs::Style;
use kernels::forward::{mma::MmaPlan, wgmma::WgmmaPlan};
use kernels::{Arch, Plan};
use problem::{DType, Problem};

use crate::{Outcome, Usage};

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
    for option in more {
        match option.strip_prefix("runs=") {
            Some(runs) => {
                settings.runs.truncate(runs.parse()?);
                settings.lagging = false;
            }
            None => settings = Settings::quick(),
        }
    }
    println!("grid {}, {} threads", bound.kernel.launch.grid, rayon::current_num_threads());
    let start = Instant::now();
    if let Some(feed) = Feed::draw(&bound, Style::Normal, 1) {
        let drawn = start.elapsed();
        feed.references(&bound)?;
        let all = start.elapsed();
        println!("inputs {drawn:.1?}, references {:.1?}", all - drawn);
    }
    let start = Instant::now();
    let check = check_kernel(&bound, &settings)?;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{} after {} runs in {seconds:.1} s ({:.2} s each), {:.1} M warp instructions/s {:?}",
        check.verdict,
        check.runs,
        seconds / f64::from(check.runs.max(1)),
        check.steps as f64 / seconds / 1e6,
        check.reasons
    );
    Ok(true)
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
