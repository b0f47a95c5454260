//! Groups the hazards of a check by cause: lines that come from unrolling one loop, and lanes that repeat a
//! fault, are one cause.

use std::borrow::Cow;
use std::collections::HashMap;

use emu::{Hazard, HazardKind, ThreadId};
use ptx::Space;
use serde::Serialize;

use crate::names::demangle;
use crate::sources::{SourceLine, Sources};

mod language;

use language::KernelLanguage;

/// One cause: hazards of one kind at one pair of source lines. Without line information: hazards of one kind
/// on one variable with one line of the other access. If there is no other access, hazards with equal
/// messages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cause {
    /// `race`, `uninitialised_read`, ….
    pub kind: HazardKind,
    /// The event in words, with demangled names.
    pub message: String,
    /// How to fix it.
    pub cure: Cow<'static, str>,
    /// Number of occurrences over all threads.
    pub count: u64,
    /// The place in memory of the first occurrence, as `name[offset]`.
    pub address: Option<String>,
    /// The threads of the first occurrence, as `CTA c warp w lane l`.
    pub threads: Vec<String>,
    /// Line of the PTX; 0 for the whole kernel.
    pub line: u32,
    /// PTX line of the other access, if there is one.
    pub other_line: Option<u32>,
    /// The PTX of `line` and of `other_line`.
    pub text: Option<String>,
    pub other_text: Option<String>,
    /// The source of `line` and of `other_line`, if the PTX has line information.
    pub source: Option<SourceLine>,
    pub other_source: Option<SourceLine>,
    /// Whether a comment of the source or the level of the check allows it.
    pub allowed: bool,
    /// All pairs of PTX lines of this cause; `line` and `other_line` are the first.
    pub ptx_lines: Vec<(u32, Option<u32>)>,
}

/// The place of a hazard, which determines its group.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Spot {
    Source(String, u32),
    Ptx(u32),
    /// Any PTX line at which this hazard occurs on this variable.
    Any {
        variable: String,
        message: String,
    },
}

/// The causes of some hazards, the worst first. A cause comes before another cause that may be its
/// consequence.
pub fn causes(hazards: &[Hazard], sources: &Sources) -> Vec<Cause> {
    let ptx = sources.ptx_lines();
    let text = |line: u32| (line as usize).checked_sub(1).and_then(|at| ptx.get(at)).map(|&t| t.to_owned());
    let mut found: Vec<Cause> = Vec::new();
    let mut known: HashMap<(HazardKind, Spot, Option<Spot>), usize> = HashMap::new();
    // Whether all hazards of a cause write one element twice: a sum in memory also reads it.
    let mut overwrites: Vec<bool> = Vec::new();
    for hazard in hazards {
        let lines = (sources.line(hazard.line), hazard.other_line.and_then(|line| sources.line(line)));
        let other = hazard.other_line.map(|line| spot(line, &lines.1));
        // The copies of an instruction in an unrolled loop are one.
        let is_one = other.as_ref().is_none_or(|other| *other == spot(hazard.line, &lines.0));
        let symmetric = matches!(
            hazard.kind,
            HazardKind::Race | HazardKind::WarpOrder | HazardKind::CasSeed | HazardKind::UnusedRead
        );
        let key = match (spot(hazard.line, &lines.0), other) {
            // Two accesses race in either order.
            (a, Some(b)) if symmetric && a > b => (hazard.kind, general(b, hazard), Some(a)),
            (a, other) => (hazard.kind, general(a, hazard), other),
        };
        let pair = (hazard.line, hazard.other_line);
        let language = KernelLanguage::of(lines.0.as_ref(), &ptx);
        let texts = [text(hazard.line), hazard.other_line.and_then(text)];
        let overwrite = is_overwrite(hazard, is_one, &texts);
        if let Some(&at) = known.get(&key) {
            found[at].count += hazard.count;
            found[at].ptx_lines.push(pair);
            if overwrites[at] && !overwrite {
                overwrites[at] = false;
                found[at].cure = cure_in(language, hazard);
            }
            continue;
        }
        known.insert(key, found.len());
        overwrites.push(overwrite);
        let [text, other_text] = texts;
        found.push(Cause {
            kind: hazard.kind,
            message: sources.readable(&hazard.message),
            cure: match overwrite {
                true => language.words(language.cure_of_overwrite()),
                false => cure_in(language, hazard),
            },
            count: hazard.count,
            address: hazard.place.as_ref().map(|place| demangle(&place.to_string()).into_owned()),
            threads: hazard.threads.iter().map(ToString::to_string).collect(),
            line: hazard.line,
            other_line: hazard.other_line,
            text,
            other_text,
            source: lines.0,
            other_source: lines.1,
            allowed: hazard.allowed,
            ptx_lines: vec![pair],
        });
    }
    found.sort_by_key(|cause| (rank(cause.kind), std::cmp::Reverse(cause.count), cause.line));
    found
}

fn spot(ptx_line: u32, source: &Option<SourceLine>) -> Spot {
    match source {
        Some(source) => Spot::Source(source.file.clone(), source.line),
        None => Spot::Ptx(ptx_line),
    }
}

/// Without a source line, nothing says which PTX lines belong together, so the hazard itself decides.
fn general(spot: Spot, hazard: &Hazard) -> Spot {
    match spot {
        Spot::Source(..) | Spot::Any { .. } => spot,
        Spot::Ptx(_) => Spot::Any {
            variable: hazard.place.as_ref().map_or_else(String::new, |place| place.name.clone()),
            message: if hazard.other_line.is_none() { hazard.message.clone() } else { String::new() },
        },
    }
}

/// The order of kinds: a kind comes before kinds that may be its consequences.
const fn rank(kind: HazardKind) -> u32 {
    match kind {
        HazardKind::OutOfBounds | HazardKind::Misaligned | HazardKind::TensorMemory => 0,
        HazardKind::TransactionMismatch | HazardKind::RegisterPool | HazardKind::LaunchControl => 1,
        HazardKind::MissingProxyFence
        | HazardKind::MissingWgmmaFence
        | HazardKind::MissingTensorFence
        | HazardKind::AsyncNotWaited
        | HazardKind::BeforeGridWait => 2,
        HazardKind::BarrierDivergence => 3,
        HazardKind::Race
        | HazardKind::WeakOrder
        | HazardKind::NonCoherentRead
        | HazardKind::WarpOrder
        | HazardKind::CasSeed => 4,
        HazardKind::AssertionFailed | HazardKind::Trap | HazardKind::Deadlock => 5,
        HazardKind::UninitialisedRead | HazardKind::UnwrittenOutput => 6,
        HazardKind::EarlyAccess
        | HazardKind::UnpromisedAlignment
        | HazardKind::UnusedRead
        | HazardKind::Nondeterministic => 7,
    }
}

/// Whether two threads store to one element of global memory, by one instruction or in two CTAs: the index of
/// one is wrong, as where a bound is missing. `texts` are the two instructions, and `is_one` says that they
/// are one.
fn is_overwrite(hazard: &Hazard, is_one: bool, texts: &[Option<String>; 2]) -> bool {
    let is_store = |text: &Option<String>| {
        text.as_ref().is_some_and(|text| text.split_whitespace().any(|word| word.starts_with("st.")))
    };
    let in_one_cta = matches!(hazard.threads[..], [a, b] if a.cta == b.cta);
    hazard.kind == HazardKind::Race
        && hazard.place.as_ref().is_some_and(|place| place.space == Space::Global)
        && texts.iter().all(is_store)
        && (!in_one_cta || is_one)
}

/// The usual fix of a hazard.
fn cure(hazard: &Hazard) -> &'static str {
    match hazard.kind {
        HazardKind::Race => cure_of_race(hazard),
        HazardKind::UninitialisedRead => {
            "write the value before it is read, and order the read after the write"
        }
        HazardKind::OutOfBounds if is_dynamic(hazard) => {
            "state the bytes of dynamic shared memory that the host code gives the launch (`dynamic_shared` under \
             [launch], --dynamic-shared)"
        }
        HazardKind::OutOfBounds => "compare the index with the size before the access, also in the last tile",
        HazardKind::Misaligned => "align the address to the width of the access, or use a narrower access",
        HazardKind::BarrierDivergence => cure_of_barrier(hazard),
        HazardKind::Deadlock => {
            "let every thread arrive that the barrier counts, and every flag be set that a loop waits for"
        }
        HazardKind::AsyncNotWaited if hazard.message.contains("wgmma") => {
            "wait for the product (wgmma.wait_group) before its registers or its memory are used again"
        }
        HazardKind::AsyncNotWaited if hazard.message.contains("tcgen05") => {
            "wait for the instruction (the mbarrier of a tcgen05.commit, or tcgen05.wait) before its memory is used again"
        }
        HazardKind::AsyncNotWaited => {
            "wait for the copy (cp.async.wait_group, or the mbarrier's phase) before its memory is used again"
        }
        HazardKind::MissingProxyFence => {
            "put fence.proxy.async between the threads' accesses and the bulk copy, before the barrier"
        }
        HazardKind::TransactionMismatch => "expect exactly the bytes that the copies of this phase transfer",
        HazardKind::MissingWgmmaFence => {
            "put wgmma.fence after the last write to the registers of the product"
        }
        HazardKind::MissingTensorFence => {
            "put tcgen05.fence::before_thread_sync before the arrival and tcgen05.fence::after_thread_sync after the \
             wait"
        }
        HazardKind::TensorMemory => {
            "use allocated columns and the warp's own lanes, and free the columns before the CTA ends"
        }
        HazardKind::LaunchControl => {
            "ask for a cluster only while every earlier response says that one was cancelled, and read its index only then"
        }
        HazardKind::UnwrittenOutput => "write every element of the output, also in the last tile",
        HazardKind::BeforeGridWait => {
            "wait (griddepcontrol.wait) before the first access to memory that an earlier launch uses"
        }
        HazardKind::EarlyAccess => {
            "wait (griddepcontrol.wait) before this access, unless no earlier launch writes this memory"
        }
        HazardKind::RegisterPool => "let setmaxnreg of the roles add up to what the CTA was launched with",
        HazardKind::WeakOrder => {
            "release the data (__threadfence() before the flag is set) and acquire it (__threadfence() after the flag \
             is read)"
        }
        HazardKind::Nondeterministic => {
            "if results must not differ from call to call, let each result have one writer, or fix the order of sums"
        }
        HazardKind::UnusedRead => "load under the condition under which the value is used",
        HazardKind::UnpromisedAlignment => "declare the variable with __align__(16)",
        HazardKind::WarpOrder => "put __syncwarp() between the two accesses: a shuffle orders no memory",
        HazardKind::CasSeed => "read the first value by a volatile or an atomic load",
        HazardKind::NonCoherentRead => {
            "use a plain load: no __ldg, and no const __restrict__ on memory that the kernel writes"
        }
        HazardKind::Trap if hazard.message.contains("not cooperative") => {
            "launch the kernel cooperatively (cudaLaunchCooperativeKernel): state `cooperative = true` under \
             [launch] or give --cooperative"
        }
        HazardKind::Trap => "find out why the kernel reaches the trap",
        HazardKind::AssertionFailed => "find out why the asserted condition does not hold",
    }
}

/// The usual fix of a hazard in the words of a language.
fn cure_in(language: KernelLanguage, hazard: &Hazard) -> Cow<'static, str> {
    let own = if language == KernelLanguage::Triton { cure_in_triton(hazard) } else { None };
    own.map_or_else(|| language.words(cure(hazard)), Cow::Borrowed)
}

/// The usual fix of a hazard in a Triton kernel, where it differs: a program has no threads to be ordered.
fn cure_in_triton(hazard: &Hazard) -> Option<&'static str> {
    let shared = hazard.place.as_ref().is_some_and(|place| place.space == Space::Shared);
    match hazard.kind {
        HazardKind::OutOfBounds if !is_dynamic(hazard) => {
            Some("give tl.load or tl.store a mask that compares the offsets with the size")
        }
        HazardKind::Race if !shared => Some(
            "let one program write each element, or use tl.atomic_add (or another tl.atomic_…), or two launches",
        ),
        _ => None,
    }
}

/// Whether an access lies beyond the dynamic shared memory of the launch.
fn is_dynamic(hazard: &Hazard) -> bool {
    hazard.message.contains("dynamic shared memory")
}

/// Words of the messages about barriers, and the cure of each. The first words that occur in a message count.
const BARRIER_CURES: [(&str, &str); 13] = [
    ("does not exist", "use one of the barriers 0 to 15"),
    ("multiple of 32", "count whole warps: give the barrier a multiple of 32 threads that is not 0"),
    ("different thread counts", "give every warp that uses the barrier the same thread count"),
    ("different operations", "use another barrier for the reduction, or the same reduction in every warp"),
    (
        "with the state of phase",
        "wait with the state of the latest arrival before the mbarrier moves on by two phases",
    ),
    ("mbarrier", COUNT_ARRIVALS),
    ("arrivals in one instruction", COUNT_ARRIVALS),
    ("cluster barrier", "let every thread arrive at the cluster barrier once, and then wait once"),
    ("fewer than four warps", "launch whole warpgroups: a multiple of 128 threads"),
    ("differ between threads", SAME_OPERANDS),
    ("differs from that of lane", SAME_OPERANDS),
    (
        "include the lane itself",
        "name in the member mask every lane that executes the instruction, and no other",
    ),
    ("setmaxnreg", "let all warps of the warpgroup execute the same setmaxnreg instructions"),
];
const COUNT_ARRIVALS: &str =
    "initialise the mbarrier for the number of arrivals of a phase, and let exactly these arrive";
const SAME_OPERANDS: &str = "give all threads of the warp the same operands";

/// A barrier is fixed by its operands, or by its place if all threads must execute it.
fn cure_of_barrier(hazard: &Hazard) -> &'static str {
    let named = BARRIER_CURES.iter().find(|(words, _)| hazard.message.contains(words));
    named.map_or(
        "move the barrier out of the branch, so that every thread of the CTA reaches the same one",
        |(_, cure)| cure,
    )
}

/// A race is fixed by an operation that orders the two threads, or by a wait for the asynchronous operation.
fn cure_of_race(hazard: &Hazard) -> &'static str {
    let shared = hazard.place.as_ref().is_some_and(|place| place.space == Space::Shared);
    let says = |word: &str| hazard.message.contains(word);
    if says("bulk copy") {
        return "wait for the phase of the copy's mbarrier (or cp.async.bulk.wait_group) in every thread that \
                uses the memory";
    }
    if says("an mbarrier") {
        return "let one thread initialise the mbarrier, and put a barrier before its first use";
    }
    if says("wgmma") {
        return "wait for the product (wgmma.wait_group) before its memory is written";
    }
    match hazard.threads[..] {
        [ThreadId { cta: a, .. }, ThreadId { cta: b, .. }] if a == b => {
            "put __syncthreads() between the two accesses (__syncwarp() if one warp alone shares the memory)"
        }
        [_, _] if shared => "put a barrier of the cluster between the two accesses",
        _ if shared => "put __syncthreads() between the two accesses",
        _ => "use an atomic, or __threadfence() and an atomic flag on both sides, or two launches",
    }
}

#[cfg(test)]
mod tests {
    use emu::Place;

    use super::*;

    fn hazard(kind: HazardKind, line: u32, other_line: Option<u32>, warps: [u32; 2]) -> Hazard {
        let thread = |warp| ThreadId { cta: 0, warp, lane: 0 };
        let place = Place { space: Space::Shared, name: "_ZZ3rowE7partial".to_owned(), offset: 4 };
        Hazard {
            kind,
            line,
            other_line,
            threads: warps.map(thread).to_vec(),
            place: Some(place),
            message: "writes memory that another thread reads, without ordering".to_owned(),
            count: 3,
            allowed: false,
        }
    }

    #[test]
    fn the_cure_of_a_barrier_follows_its_cause() {
        let cure = |message: &str| {
            let mut hazard = hazard(HazardKind::BarrierDivergence, 9, None, [0, 1]);
            hazard.message = message.to_owned();
            super::cure(&hazard)
        };
        for (message, part) in [
            ("barrier 16 does not exist: a CTA has barriers 0 to 15", "barriers 0 to 15"),
            ("barrier 1 counts 48 threads: the count must be a multiple of 32", "a multiple of 32"),
            ("warps use barrier 1 with different thread counts: 64 and 96", "the same thread count"),
            ("warps use barrier 1 with different operations in one phase", "another barrier"),
            ("0 arrivals in one instruction: expected 1 to 1048575", "number of arrivals"),
            ("4 arrivals at an mbarrier that waits for 3 more: the count is too small", "number of arrivals"),
            ("waits with the state of phase 0 of an mbarrier that is in phase 3", "the latest arrival"),
            ("lanes 0x0000ffff of the warp wait for lanes 0xffff0000: they never come", "out of the branch"),
        ] {
            assert!(cure(message).contains(part), "{message}: {}", cure(message));
        }
    }

    #[test]
    fn a_wrong_launch_is_told_from_a_wrong_index() {
        let cure = |kind, message: &str| {
            let mut hazard = hazard(kind, 9, None, [0, 1]);
            hazard.message = message.to_owned();
            let triton = cure_in_triton(&hazard);
            triton.unwrap_or_else(|| super::cure(&hazard))
        };
        let dynamic = "accesses 4 bytes of dynamic shared memory, of which the launch gives 0 bytes";
        assert!(cure(HazardKind::OutOfBounds, dynamic).contains("dynamic_shared"));
        let beyond = "accesses 4 bytes beyond the bounds of 64 bytes";
        assert!(cure(HazardKind::OutOfBounds, beyond).contains("mask"));
        let grid = "the kernel traps: it asks for the workspace of a grid barrier, and the launch is not cooperative";
        assert!(cure(HazardKind::Trap, grid).contains("--cooperative"));
        assert!(cure(HazardKind::Trap, "the kernel traps").contains("find out why"));
    }

    /// Two stores to one element are cured at their index, and a sum in memory by an atomic.
    #[test]
    fn an_element_of_two_writers_is_told_from_a_sum() {
        let ptx = ".version 7.0\n.target sm_80\n.visible .entry k()\n{\n.loc 1 5 1\nld.global.f32 %f0, [%rd0];\n\
            st.global.f32 [%rd0], %f0;\nred.global.add.f32 [%rd0], %f0;\nst.global.f32 [%rd0+4], %f0;\n\
            .loc 1 6 1\nst.global.f32 [%rd0], %f0;\nret;\n}\n.file 1 \"a.cu\"\n";
        let told = |lines: &[(u32, u32)], ctas: [u64; 2], space| {
            let of = |&(line, other): &(u32, u32)| {
                let mut hazard = hazard(HazardKind::Race, line, Some(other), [0, 1]);
                hazard.threads = ctas.map(|cta| ThreadId { cta, warp: 0, lane: 0 }).to_vec();
                hazard.place = Some(Place { space, name: "y".to_owned(), offset: 0 });
                hazard
            };
            let hazards: Vec<Hazard> = lines.iter().map(of).collect();
            let [cause] = &super::causes(&hazards, &Sources::from(ptx.to_owned()))[..] else {
                panic!("{lines:?}")
            };
            cause.cure.split(':').next().unwrap().to_owned()
        };
        let one_writer = "let one thread write each element";
        assert_eq!(told(&[(7, 7)], [0, 1], Space::Global), one_writer);
        assert_eq!(told(&[(7, 7)], [0, 0], Space::Global), one_writer);
        // Line 9 is a copy of line 7 in an unrolled loop.
        assert_eq!(told(&[(7, 9)], [0, 0], Space::Global), one_writer);
        for (lines, ctas, space, part) in [
            (&[(7, 7), (6, 7)][..], [0, 1], Space::Global, "use an atomic"),
            (&[(6, 7), (7, 7)], [0, 1], Space::Global, "use an atomic"),
            (&[(7, 8)], [0, 1], Space::Global, "use an atomic"),
            (&[(7, 7)], [0, 0], Space::Shared, "put __syncthreads()"),
            (&[(7, 11)], [0, 0], Space::Global, "put __syncthreads()"),
        ] {
            assert!(told(lines, ctas, space).starts_with(part), "{lines:?}: {}", told(lines, ctas, space));
        }
    }

    #[test]
    fn unrolled_lines_and_both_orders_are_one_cause() {
        let ptx = ".version 7.0\n.target sm_80\n.visible .entry k()\n{\n.loc 1 5 1\nbar.sync 0;\n\
            bar.sync 1;\n\
            .loc 1 6 1\nbar.sync 2;\nret;\n}\n.file 1 \"a.cu\"\n";
        let hazards = [
            hazard(HazardKind::UninitialisedRead, 9, None, [0, 1]),
            hazard(HazardKind::Race, 6, Some(9), [0, 1]),
            hazard(HazardKind::Race, 7, Some(9), [0, 1]),
            hazard(HazardKind::Race, 9, Some(6), [0, 1]),
            hazard(HazardKind::Race, 6, Some(7), [1, 1]),
        ];
        let causes = super::causes(&hazards, &Sources::from(ptx.to_owned()));
        let shown: Vec<_> = causes.iter().map(|c| (c.kind, c.line, c.other_line, c.count)).collect();
        assert_eq!(
            shown,
            [
                (HazardKind::Race, 6, Some(9), 9),
                (HazardKind::Race, 6, Some(7), 3),
                (HazardKind::UninitialisedRead, 9, None, 3),
            ]
        );
        assert_eq!(causes[0].ptx_lines, [(6, Some(9)), (7, Some(9)), (9, Some(6))]);
        assert_eq!(causes[0].address.as_deref(), Some("row::partial[0x4]"));
        assert_eq!(
            (causes[0].text.as_deref(), causes[0].other_text.as_deref()),
            (Some("bar.sync 0;"), Some("bar.sync 2;"))
        );
        assert!(causes[0].cure.contains("__syncthreads()"), "{}", causes[0].cure);
        assert_eq!(causes[0].other_source.as_ref().unwrap().name(), "a.cu:6");
        // Without line information, the line of the other access distinguishes races on one variable.
        let plain = Sources::from(ptx.replace(".loc", "//"));
        let shown: Vec<_> = super::causes(&hazards, &plain).iter().map(|c| c.ptx_lines.clone()).collect();
        let racing = vec![(6, Some(9)), (7, Some(9)), (9, Some(6))];
        assert_eq!(shown, [racing, vec![(6, Some(7))], vec![(9, None)]]);
    }
}
