//! Knowledge about genes: values that helped, and cures for findings of the diagnosis.

use std::collections::BTreeMap;

use kernels::Symptom;
use kernels::genes::Turn;
use rand::Rng;
use rand::seq::IndexedRandom;
use serde_json::{Map, Value};

use super::space::{Space, family, genome, with_genes};
use ledger::Candidate;

/// A gene's value in a family: `("mma", "block_n", "64")`.
type Key = (String, String, String);

/// The mean gain of each gene value over parents with another value, over all problems of a run and wins of
/// other runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Guidance {
    effects: BTreeMap<Key, (u32, f64)>,
}

impl Guidance {
    /// Records that a child with these changes took `child_us` and its parent `parent_us`. Several changed
    /// genes share the gain.
    pub fn learn(&mut self, family: &str, changes: &Value, parent_us: f64, child_us: f64) {
        let Some(changes) = changes.as_object() else { return };
        let share = (parent_us / child_us).ln() / changes.len().max(1) as f64;
        if !share.is_finite() {
            return;
        }
        for (gene, pair) in changes {
            for (value, gain) in [(&pair[1], share), (&pair[0], -share)] {
                let key = (family.to_owned(), gene.clone(), value.to_string());
                let effect = self.effects.entry(key).or_default();
                *effect = (effect.0 + 1, effect.1 + gain);
            }
        }
    }

    /// The values that helped a family, best first, with their mean log-gain. A value with a single pair
    /// counts half.
    pub fn helped(&self, family: &str) -> Vec<(&str, &str, f64)> {
        let of = self.effects.iter().filter(|(key, _)| key.0 == family);
        let mut found: Vec<_> = of
            .map(|((_, gene, value), (n, sum))| (gene.as_str(), value.as_str(), sum / f64::from(n + 1)))
            .collect();
        found.retain(|(_, _, gain)| *gain > 0.0);
        found.sort_by(|a, b| b.2.total_cmp(&a.2));
        found
    }

    /// The plan with a value that helped elsewhere and that the plan does not have yet, with the name of the
    /// change.
    pub fn apply(&self, plan: &Candidate, space: &Space, rng: &mut impl Rng) -> Option<(Candidate, String)> {
        let own = genome(plan);
        let mut options = Vec::new();
        for (gene, value, _) in self.helped(family(plan)) {
            let Ok(value) = serde_json::from_str::<Value>(value) else { continue };
            if own.get(gene).is_some_and(|known| *known != value) {
                let change = Map::from_iter([(gene.to_owned(), value)]);
                if let Some(better) = with_genes(plan, &change).filter(|better| space.fits(better)) {
                    options.push((better, gene.to_owned()));
                }
            }
        }
        // Draws one of the best four, better ones with higher probability.
        options.truncate(4);
        let place = rng.random_range(0..options.len().max(1)).min(rng.random_range(0..options.len().max(1)));
        (place < options.len()).then(|| options.swap_remove(place))
    }
}

/// Findings that no gene cures, because they follow from how the kernel is built: scalar arithmetic, work by
/// a single thread, single-byte accesses. The cure is a random sample of the named family.
const CURED_BY_FAMILY: [(Symptom, &str); 8] = [
    (Symptom::TensorCoresUnused, "mma"),
    (Symptom::TensorCoresHardlyUsed, "mma"),
    (Symptom::SerialReduction, "mma"),
    (Symptom::SerialSection, "mma"),
    (Symptom::IdleLanes, "mma"),
    (Symptom::ScalarAccesses, "mma"),
    (Symptom::BankConflicts, "mma"),
    (Symptom::Uncoalesced, "mma"),
];

/// The plan with one of its findings cured, and the finding's name. `findings` are in the form of
/// `explain --json`.
pub fn cure(
    plan: &Candidate,
    findings: &Value,
    bound: Option<&str>,
    space: &Space,
    rng: &mut impl Rng,
) -> Option<(Candidate, String)> {
    let named = findings.as_array().into_iter().flatten().filter_map(|finding| finding["name"].as_str());
    let found: Vec<Symptom> = named.chain(bound).filter_map(Symptom::named).collect();
    let mut order: Vec<usize> = (0..found.len()).collect();
    // The finding with the largest potential gain usually comes first, sometimes another one.
    if order.len() > 1 && rng.random_bool(0.5) {
        order.rotate_left(rng.random_range(1..found.len()));
    }
    order.into_iter().find_map(|at| {
        let symptom = found[at];
        let cured = match space.family_of(plan) {
            Some(_) => turned(plan, symptom, space, rng),
            None => of_another_family(symptom, space, rng),
        };
        cured.map(|plan| (plan, symptom.to_string()))
    })
}

/// The plan with one gene changed in the direction that the finding's cure states.
fn turned(plan: &Candidate, symptom: Symptom, space: &Space, rng: &mut impl Rng) -> Option<Candidate> {
    let own = genome(plan);
    let mut options = Vec::new();
    for gene in &space.family_of(plan)?.genes {
        let Some(place) = gene.values.iter().position(|value| own.get(gene.name) == Some(value)) else {
            continue;
        };
        for (_, turn) in gene.cures.iter().filter(|(cured, _)| *cured == symptom) {
            // The two nearest values.
            let values: Vec<&Value> = match turn {
                Turn::Up => gene.values[place + 1..].iter().take(2).collect(),
                Turn::Down => gene.values[..place].iter().rev().take(2).collect(),
                Turn::To(word) => gene.values.iter().filter(|value| value.as_str() == Some(word)).collect(),
            };
            for value in values {
                let change = Map::from_iter([(gene.name.to_owned(), value.clone())]);
                options.extend(with_genes(plan, &change).filter(|cured| cured != plan && space.fits(cured)));
            }
        }
    }
    options.choose(rng).cloned()
}

/// A plan of a family whose kernels do not have the finding.
fn of_another_family(symptom: Symptom, space: &Space, rng: &mut impl Rng) -> Option<Candidate> {
    let (_, wanted) = CURED_BY_FAMILY.iter().find(|(cured, _)| *cured == symptom)?;
    let family = space.families.iter().find(|family| family.name == *wanted).or(space.families.first())?;
    Space { domain: space.domain.clone(), families: vec![family.clone()] }.random(rng)
}

#[cfg(test)]
mod tests {
    use kernels::Arch;
    use problem::Problem;
    use rand::SeedableRng;
    use rand::rngs::SmallRng;
    use serde_json::json;

    use super::*;
    use crate::space::changes;
    use ledger::{KernelText, Language};

    #[test]
    fn what_helped_is_tried_elsewhere() {
        let space = Space::gpu(&Problem::mission(), &Arch::SM_90, &["mma".to_owned()]);
        let plan = &space.families[0].template;
        let mut guidance = Guidance::default();
        guidance.learn("mma", &json!({ "stages": [2, 3] }), 10.0, 9.0);
        guidance.learn("mma", &json!({ "stages": [2, 3] }), 12.0, 11.0);
        guidance.learn("mma", &json!({ "warps": [4, 8] }), 10.0, 15.0);
        guidance.learn("small_streamed", &json!({ "stages": [2, 8] }), 10.0, 1.0);
        let helped = guidance.helped("mma");
        assert!(helped.contains(&("warps", "4", helped.iter().find(|h| h.0 == "warps").unwrap().2)));
        assert!(helped.iter().all(|(gene, value, _)| (*gene, *value) != ("stages", "2")), "{helped:?}");
        let mut rng = SmallRng::seed_from_u64(1);
        let found: Vec<String> =
            (0..20).filter_map(|_| guidance.apply(plan, &space, &mut rng)).map(|(_, gene)| gene).collect();
        assert!(found.iter().any(|gene| gene == "stages"), "{found:?}");
    }

    #[test]
    fn findings_move_the_genes_that_cure_them() {
        let space = Space::gpu(&Problem::mission(), &Arch::SM_90, &["mma".to_owned()]);
        let plan = &space.families[0].template;
        let mut rng = SmallRng::seed_from_u64(2);
        let findings = json!([{ "name": "small grid" }]);
        for _ in 0..10 {
            let (cured, name) = cure(plan, &findings, None, &space, &mut rng).unwrap();
            let changes = changes(plan, &cured);
            assert_eq!(name, "small grid");
            let smaller = changes.get("block_m").is_some_and(|pair| pair[1].as_u64() < pair[0].as_u64());
            let shared = changes.get("kv_warps").is_some_and(|pair| pair[1].as_u64() > pair[0].as_u64());
            let divided = changes.get("splits").is_some_and(|pair| pair[1].as_u64() > pair[0].as_u64());
            assert!(smaller || shared || divided, "{changes}");
        }
        assert_eq!(cure(plan, &json!([]), None, &space, &mut rng), None);
    }

    /// A kernel without genes is replaced by a plan of a family without the finding.
    #[test]
    fn a_whole_kernel_leads_to_a_family() {
        let space = Space::gpu(&Problem::mission(), &Arch::SM_90, &[]);
        let (text, launch) = ("a kernel".into(), String::new());
        let kernel = Candidate::Kernel(KernelText { language: Language::Ptx, text, launch });
        let findings = json!([{ "name": "tensor cores unused" }, { "name": "barriers" }]);
        let mut rng = SmallRng::seed_from_u64(4);
        let (cured, name) = cure(&kernel, &findings, Some("latency"), &space, &mut rng).unwrap();
        assert_eq!((family(&cured), name.as_str()), ("mma", "tensor cores unused"));
    }
}
