//! Joins loads of adjacent words as the compiler does.

use std::collections::HashMap;

use super::address::Linear;
use super::lower::{Action, Cached, Direction, Lowered};

/// For each load of a straight run, the earlier load with which it is merged. ptxas joins loads of adjacent
/// elements to one load of two or four elements, up to 16 bytes, if it can derive the alignment.
pub(super) fn joined_loads(nodes: &[Lowered], alignment: &[u8]) -> Vec<Option<usize>> {
    let mut values: HashMap<u32, Linear> = HashMap::new();
    let mut roots: HashMap<u32, u8> = HashMap::new();
    let mut leaders: HashMap<(bool, Linear, u32), usize> = HashMap::new();
    let mut joined = vec![None; nodes.len()];
    let mut next_root = alignment.len() as u32;
    for (i, node) in nodes.iter().enumerate() {
        let value_of = |r: u32| values.get(&r).cloned().unwrap_or_else(|| Linear::register(r));
        let shared = matches!(node.action, Action::Shared(_));
        match node.action {
            Action::Shared(Direction::Load) | Action::Cached(Direction::Load, Cached::L1 | Cached::Local) => {
                if let Some(load) = node.load {
                    let mut place = value_of(load.base);
                    place.constant += load.offset;
                    let window = window(&place, load.element, alignment, &roots);
                    if window > i64::from(load.element) {
                        place.constant = place.constant.div_euclid(window);
                        let leader = *leaders.entry((shared, place, load.element)).or_insert(i);
                        joined[i] = (leader != i).then_some(leader);
                    }
                }
            }
            Action::Shared(_) => leaders.retain(|key, _| !key.0),
            Action::Cached(..) => leaders.retain(|key, _| key.0),
            Action::Arithmetic | Action::Exchange | Action::Branch => {}
            _ => leaders.clear(),
        }
        let result = node.linear.as_ref().map(|sum| {
            let constant = Linear { constant: sum.constant, ..Linear::default() };
            sum.terms.iter().fold(constant, |all, (r, c)| all.plus(value_of(*r).scaled(*c)))
        });
        for r in &node.writes {
            let value = result.clone().unwrap_or_else(|| {
                next_root += 1;
                roots.insert(next_root, alignment.get(*r as usize).copied().unwrap_or(0));
                Linear::register(next_root)
            });
            values.insert(*r, value);
        }
    }
    joined
}

/// Size in bytes of the widest aligned access that could contain this element.
fn window(place: &Linear, element: u32, alignment: &[u8], roots: &HashMap<u32, u8>) -> i64 {
    let zeros = |root: u32| roots.get(&root).or(alignment.get(root as usize)).copied().unwrap_or(0);
    let known = place.terms.iter().map(|(r, c)| u32::from(zeros(*r)) + c.trailing_zeros()).min().unwrap_or(4);
    (1i64 << known.min(4)).min(4 * i64::from(element))
}
