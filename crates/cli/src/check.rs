//! `flashcore check`.

use std::io::Write;

use emu::model::machine;
use lab::gate::{Settings, Verdict};
use lab::study::{Study, study};

use crate::args::Check;
use crate::error::CliError;
use crate::{Status, source, unless_closed};

pub fn check(args: &Check) -> Result<Status, CliError> {
    let (bound, text) = source::load(&args.file, &args.launch, args.sm)?;
    let settings = if args.quick { Settings::quick() } else { Settings::thorough() };
    let ptxas = emu::resources::Ptxas::find().ok();
    let target = bound.kernel.module.target;
    let gpu = [machine::L4, machine::H200].into_iter().find(|gpu| target.runs_on(gpu.sm));
    let study = study(bound, Some(text), &settings, &[gpu.unwrap_or(machine::L4)], ptxas.as_ref())?;
    let mut out = std::io::stdout().lock();
    unless_closed(if args.json {
        let findings = serde_json::to_value(&study.findings).unwrap_or_default();
        writeln!(out, "{}", study.proof.json(&findings)).map_err(CliError::from)
    } else {
        print(&mut out, &study)
    })?;
    Ok(match study.proof.verdict {
        Verdict::Proven => Status::Proven,
        Verdict::Refuted => Status::Refuted,
        Verdict::Incomplete => Status::Incomplete,
    })
}

fn print(out: &mut impl Write, study: &Study) -> Result<(), CliError> {
    let proof = &study.proof;
    writeln!(out, "{} after {} runs in the emulator", proof.verdict, proof.runs)?;
    for reason in &proof.reasons {
        writeln!(out, "  {reason}")?;
    }
    let lines: Vec<&str> = study.text.lines().collect();
    for hazard in proof.hazards.iter().take(8) {
        let places = [Some(hazard.line), hazard.other_line];
        for line in places.into_iter().flatten().filter(|&l| l > 0) {
            let quoted = lines.get(line as usize - 1).map_or("", |l| l.trim());
            writeln!(out, "  {line:>6} | {quoted}")?;
        }
    }
    if let Some(error) = proof.error {
        let close = if error.allclose_1e3 { "yes" } else { "no" };
        writeln!(
            out,
            "largest error {:.2e} (allowed {:.2e}), relative {:.2e} (allowed {:.2e}); max_diff {:.6}, allclose(1e-3): {close}",
            error.max_abs, error.max_abs_allowed, error.rel, error.rel_allowed, error.max_diff
        )?;
    }
    for finding in &study.findings {
        writeln!(out, "{}: {}", finding.name, finding.evidence)?;
    }
    Ok(())
}
