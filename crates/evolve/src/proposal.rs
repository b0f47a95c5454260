//! The brief for a proposer: the information that a person would need to write a faster kernel.

use serde_json::{Value, json};

use super::engine::Evolution;
use super::member::Member;
use super::rank;
use super::space::family;
use check::gate::bind;
use ledger::Arm;
use ledger::{Candidate, KernelText};

/// Number of latest candidates in the history.
const HISTORY: usize = 20;
/// Number of a kernel's lines in the history; `WIDTH` is the number of characters of each line.
const LINES: usize = 4;
const WIDTH: usize = 120;
/// Number of values that helped.
const HELPED: usize = 12;

/// Problem, device, incumbent with its source, findings, values that helped and history.
pub(super) fn brief(evolution: &Evolution, case: usize) -> Value {
    let search = &evolution.searches[case];
    let population = &search.population;
    let config = &evolution.config;
    let baseline = population.baseline.and_then(|id| population.members.get(&id));
    let incumbent = rank::best(population).or(baseline);
    let helped = incumbent.map(|m| evolution.guidance.helped(family(&m.candidate))).unwrap_or_default();
    let helped: Vec<Value> = helped
        .into_iter()
        .take(HELPED)
        .map(|(gene, value, gain)| json!({ "gene": gene, "value": value, "gain": gain.exp() }))
        .collect();
    let counted = population.members.values().filter(|m| m.arm != Arm::Control).rev().take(HISTORY);
    json!({
        "problem": population.problem,
        "target": config.target,
        "device": config.device,
        "arch": config.arch,
        "incumbent": incumbent.map(|member| shown(evolution, member)),
        "findings": incumbent.map(|member| &member.findings),
        "helped": helped,
        "history": counted.map(line).collect::<Vec<_>>(),
    })
}

/// The incumbent: its plan with the kernel's text, and a launch file with which the text can be submitted
/// again.
fn shown(evolution: &Evolution, member: &Member) -> Value {
    let (source, launch) = match (&member.candidate, evolution.config.arch) {
        (Candidate::Gpu(plan), Some(arch)) => {
            let bound = bind(plan, &member.problem.problem(), &arch).ok();
            let text = bound.as_ref().map(|bound| bound.kernel.module.to_string());
            (text, bound.and_then(|bound| bound.launch_file()))
        }
        (Candidate::Kernel(source), _) => (Some(source.text.clone()), Some(source.launch.clone())),
        _ => (None, None),
    };
    let us = member.time.map(|time| time.us);
    json!({ "candidate": member.candidate, "us": us, "source": source, "launch": launch })
}

fn line(member: &Member) -> Value {
    let candidate = match &member.candidate {
        Candidate::Kernel(KernelText { language, text, .. }) => {
            let begins: Vec<String> =
                text.lines().take(LINES).map(|line| line.chars().take(WIDTH).collect()).collect();
            json!({ "kernel": { "language": language, "hash": member.hash, "begins": begins.join("\n") } })
        }
        plan => json!(plan),
    };
    json!({
        "candidate": candidate,
        "operator": member.operator,
        "us": member.time.map(|time| time.us),
        "rejection": member.rejection,
    })
}
