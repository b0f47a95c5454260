//! Litmus tests of the memory consistency model (PTX ISA, "Memory Consistency Model"). Each test has some
//! threads, each the one thread of a CTA, which access the locations `x`, `y` and `z`. Outcomes are the
//! values of registers, in runs whose strong reads may return older values. Races are looked for in other
//! runs, with weak accesses.

use std::collections::BTreeSet;

use flashcore_emu::{Buffer, HazardKind, Options, Schedule, run};
use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, Launch};

/// A test, and the CTAs of a cluster.
struct Litmus<'a> {
    threads: &'a [&'a str],
    cluster: u32,
}

/// Short forms, and what they stand for.
const FORMS: [(&str, &str); 4] =
    [("{x}", "[%rd1]"), ("{y}", "[%rd1+128]"), ("{z}", "[%rd1+256]"), (";", ";\n")];

impl Litmus<'_> {
    fn kernel(&self) -> Kernel {
        let mut text = String::from(
            ".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 o)\n{\n\
             .reg .b32 %r<10>;\n.reg .b64 %rd<9>;\n.reg .pred %p<9>;\nld.param.u64 %rd1, [a];\n\
             ld.param.u64 %rd2, [o];\nmov.u32 %r9, %ctaid.x;\n",
        );
        for number in 0..4 {
            text += &format!("mov.u32 %r{number}, 0;\n");
        }
        for (thread, body) in self.threads.iter().enumerate() {
            let label = format!("WAIT{thread}");
            let body =
                FORMS.iter().fold(body.replace("WAIT", &label), |text, (from, to)| text.replace(from, to));
            text += &format!("setp.ne.u32 %p8, %r9, {thread};\n@%p8 bra NEXT{thread};\n{body}\n");
            for number in 0..4 {
                text += &format!("st.global.u32 [%rd2+{}], %r{number};\n", 16 * thread + 4 * number);
            }
            text += &format!("ret;\nNEXT{thread}:\n");
        }
        text += "ret;\n}\n";
        let count = self.threads.len() as u32;
        let module = ptx::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let module = module.verify().unwrap_or_else(|error| panic!("{error}\n{text}"));
        let access = Access::ReadWrite;
        Kernel {
            tensor_maps: Vec::new(),
            module,
            entry: "k".into(),
            launch: Launch {
                cluster: Dim3(self.cluster, 1, 1),
                ..Launch::new(Dim3(count, 1, 1), Dim3(1, 1, 1))
            },
            buffers: vec![
                BufferSpec { name: "places".into(), bytes: 384, access },
                BufferSpec { name: "out".into(), bytes: 16 * count as usize, access },
            ],
            args: vec![Arg::Buffer { index: 0, offset: 0 }, Arg::Buffer { index: 1, offset: 0 }],
        }
    }

    /// Runs the test with each CTA first, or all evenly, under several schedules and seeds.
    fn each_run(&self, weak: bool, seeds: u64, mut found: impl FnMut(&[u32], &[HazardKind])) {
        let kernel = self.kernel();
        for seed in 0..seeds {
            for first in (0..self.threads.len() as u64).map(Some).chain([None]) {
                let schedule = if seed % 3 == 0 { Schedule::Late } else { Schedule::Random };
                let mut places = Buffer::from_bytes(&[0; 384]);
                let mut out = Buffer::from_bytes(&vec![0; 16 * self.threads.len()]);
                let options = Options { seed, schedule, first, weak, ..Options::default() };
                let report = run(&kernel, &mut [&mut places, &mut out], &options).unwrap();
                let words: Vec<u32> = out
                    .to_bytes()
                    .chunks_exact(4)
                    .map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]))
                    .collect();
                let kinds: Vec<HazardKind> = report.hazards.iter().map(|hazard| hazard.kind).collect();
                found(&words, &kinds);
            }
        }
    }

    /// The values of the registers, given by thread and number, over many runs.
    fn outcomes(&self, registers: &[(usize, usize)]) -> BTreeSet<Vec<u32>> {
        let mut found = BTreeSet::new();
        self.each_run(true, 120, |words, _| {
            found.insert(registers.iter().map(|(thread, number)| words[4 * thread + number]).collect());
        });
        found
    }

    /// Whether all runs report a race, or none. `None` if it depends on the run.
    fn races(&self) -> Option<bool> {
        let mut found = BTreeSet::new();
        self.each_run(false, 12, |_, kinds| {
            found.insert(kinds.contains(&HazardKind::Race));
        });
        if found.len() == 1 { found.first().copied() } else { None }
    }
}

/// Asserts whether the runs of a test show an outcome.
fn shows(threads: &[&str], registers: &[(usize, usize)], outcome: &[u32], expected: bool) {
    shows_in_clusters(1, threads, registers, outcome, expected);
}

fn shows_in_clusters(
    cluster: u32,
    threads: &[&str],
    registers: &[(usize, usize)],
    outcome: &[u32],
    expected: bool,
) {
    let found = Litmus { threads, cluster }.outcomes(registers);
    assert_eq!(found.contains(outcome), expected, "{threads:?}: {found:?}, and {outcome:?} in question");
}

#[track_caller]
fn races(threads: &[&str], expected: bool) {
    races_in_clusters(1, threads, expected);
}

#[track_caller]
fn races_in_clusters(cluster: u32, threads: &[&str], expected: bool) {
    assert_eq!(Litmus { threads, cluster }.races(), Some(expected), "{threads:?}");
}

const X: &str = "st.relaxed.gpu.global.u32 {x}, 1;";
const Y: &str = "st.relaxed.gpu.global.u32 {y}, 1;";
const FENCE: &str = "fence.acq_rel.gpu;";
const SC: &str = "fence.sc.gpu;";

/// Reads a location with a relaxed load.
fn read(register: usize, place: char) -> String {
    format!("ld.relaxed.gpu.global.u32 %r{register}, {{{place}}};")
}

fn thread(parts: &[&str]) -> String {
    parts.concat()
}

/// Message passing with strong data: which fences forbid that the flag is seen and the data is not.
#[test]
fn message_passing() {
    let (flag, data) = (read(0, 'y'), read(1, 'x'));
    let cases: [(&[&str], &[&str], bool); 9] = [
        (&[X, Y], &[&flag, &data], true),
        (&[X, FENCE, Y], &[&flag, &data], true),
        (&[X, Y], &[&flag, FENCE, &data], true),
        (&[X, FENCE, Y], &[&flag, FENCE, &data], false),
        (&[X, SC, Y], &[&flag, SC, &data], false),
        (&[X, SC, Y], &[SC, &flag, &data], true),
        (&[X, FENCE, Y], &[FENCE, &flag, &data], true),
        (&[X, "st.release.gpu.global.u32 {y}, 1;"], &["ld.acquire.gpu.global.u32 %r0, {y};", &data], false),
        (&[X, "fence.acq_rel.cta;", Y], &[&flag, "fence.acq_rel.gpu;", &data], true),
    ];
    for (writer, reader, weak) in cases {
        shows(&[&thread(writer), &thread(reader)], &[(1, 0), (1, 1)], &[1, 0], weak);
    }
}

/// Only sequentially consistent fences in both threads keep both from missing the other's store.
#[test]
fn store_buffering() {
    for (fences, weak) in [(["", ""], true), ([FENCE, FENCE], true), ([SC, ""], true), ([SC, SC], false)] {
        let threads = [thread(&[X, fences[0], &read(0, 'y')]), thread(&[Y, fences[1], &read(0, 'x')])];
        shows(&[&threads[0], &threads[1]], &[(0, 0), (1, 0)], &[0, 0], weak);
        shows(&[&threads[0], &threads[1]], &[(0, 0), (1, 0)], &[1, 0], true);
    }
}

/// Two readers may see two stores in different orders, unless both have `fence.sc`.
#[test]
fn independent_reads_of_independent_writes() {
    for (fence, weak) in [("", true), (FENCE, true), (SC, false)] {
        let readers =
            [thread(&[&read(0, 'x'), fence, &read(1, 'y')]), thread(&[&read(0, 'y'), fence, &read(1, 'x')])];
        let threads = [X, Y, &readers[0], &readers[1]];
        shows(&threads, &[(2, 0), (2, 1), (3, 0), (3, 1)], &[1, 0, 1, 0], weak);
    }
}

/// A thread does not see a newer and then an older value of one location.
#[test]
fn reads_of_one_location_are_coherent() {
    let reader = thread(&[&read(0, 'x'), &read(1, 'x')]);
    shows(&[X, &reader], &[(1, 0), (1, 1)], &[1, 0], false);
    shows(&[X, &reader], &[(1, 0), (1, 1)], &[0, 1], true);
}

/// Causality order, rule 2: an observed write comes before what follows its observer, though its thread has
/// no fence. Without the fence of the observer it does not.
#[test]
fn write_to_read_causality() {
    let last = thread(&[&read(0, 'y'), FENCE, &read(1, 'x')]);
    for (fence, weak) in [(FENCE, false), (SC, false), ("", true)] {
        let middle = thread(&[&read(0, 'x'), fence, Y]);
        shows(&[X, &middle, &last], &[(1, 0), (2, 0), (2, 1)], &[1, 1, 0], weak);
    }
    let relaxed = thread(&[&read(0, 'y'), &read(1, 'x')]);
    let middle = thread(&[&read(0, 'x'), FENCE, Y]);
    shows(&[X, &middle, &relaxed], &[(1, 0), (2, 0), (2, 1)], &[1, 1, 0], true);
}

/// Synchronisation passes through a thread in the middle.
#[test]
fn synchronisation_is_transitive() {
    let (first, last) = (thread(&[X, FENCE, Y]), thread(&[&read(0, 'z'), FENCE, &read(1, 'x')]));
    for (fence, weak) in [(FENCE, false), ("", true)] {
        let middle = thread(&[&read(0, 'y'), fence, "st.relaxed.gpu.global.u32 {z}, 1;"]);
        shows(&[&first, &middle, &last], &[(1, 0), (2, 0), (2, 1)], &[1, 1, 0], weak);
    }
}

/// Atomics continue the release of the write that they observe; a store of another thread ends it.
#[test]
fn release_sequences() {
    let first = thread(&[X, "st.release.gpu.global.u32 {y}, 1;"]);
    let last = thread(&["ld.acquire.gpu.global.u32 %r0, {y};", &read(1, 'x')]);
    let middles = [
        ("atom.relaxed.gpu.global.add.u32 %r0, {y}, 1;", false),
        ("red.relaxed.gpu.global.add.u32 {y}, 1;", false),
        ("st.relaxed.gpu.global.u32 {y}, 2;", true),
    ];
    for (middle, weak) in middles {
        shows(&[&first, middle, &last], &[(2, 0), (2, 1)], &[2, 0], weak);
    }
    let own = thread(&[X, "st.release.gpu.global.u32 {y}, 1;", "st.relaxed.gpu.global.u32 {y}, 2;"]);
    shows(&[&own, &last], &[(1, 0), (1, 1)], &[2, 0], false);
}

/// The value of a store buffer of one's own thread is always seen.
#[test]
fn a_thread_sees_its_own_stores() {
    let own = thread(&[X, &read(0, 'x')]);
    shows(&[&own, Y], &[(0, 0)], &[0], false);
}

/// Scopes must include both threads.
#[test]
fn scopes() {
    let at = |scope: &str| {
        [
            thread(&[X, &format!("st.release.{scope}.global.u32 {{y}}, 1;")]),
            thread(&[&format!("ld.acquire.{scope}.global.u32 %r0, {{y}};"), &read(1, 'x')]),
        ]
    };
    for (scope, cluster, weak) in [
        ("cta", 1, true),
        ("cluster", 1, true),
        ("cluster", 2, false),
        ("cta", 2, true),
        ("gpu", 1, false),
        ("sys", 1, false),
    ] {
        let threads = at(scope);
        shows_in_clusters(cluster, &[&threads[0], &threads[1]], &[(1, 0), (1, 1)], &[1, 0], weak);
    }
}

const WAIT_ACQUIRE: &str =
    "WAIT: ld.acquire.gpu.global.u32 %r0, {y}; setp.eq.u32 %p1, %r0, 0; @%p1 bra WAIT;";
const WAIT_RELAXED: &str =
    "WAIT: ld.relaxed.gpu.global.u32 %r0, {y}; setp.eq.u32 %p1, %r0, 0; @%p1 bra WAIT;";
const WEAK_X: &str = "st.global.u32 {x}, 1;";
const READ_X: &str = "ld.global.u32 %r1, {x};";

/// Message passing with weak data: whether it races does not depend on the run.
#[test]
fn weak_messages() {
    let release = "st.release.gpu.global.u32 {y}, 1;";
    let cases: [(&[&str], &[&str], bool); 10] = [
        (&[WEAK_X, release], &[WAIT_ACQUIRE, READ_X], false),
        (&[WEAK_X, Y], &[WAIT_ACQUIRE, READ_X], true),
        (&[WEAK_X, release], &[WAIT_RELAXED, READ_X], true),
        (&[WEAK_X, FENCE, Y], &[WAIT_RELAXED, FENCE, READ_X], false),
        (&[WEAK_X, SC, Y], &[SC, WAIT_RELAXED, READ_X], true),
        (&[WEAK_X, FENCE, Y, Y], &[WAIT_ACQUIRE, READ_X], false),
        (&[FENCE, WEAK_X, Y], &[WAIT_ACQUIRE, READ_X], true),
        (&[WEAK_X, "red.release.gpu.global.add.u32 {y}, 1;"], &[WAIT_ACQUIRE, READ_X], false),
        (&[WEAK_X, "fence.acq_rel.cta;", Y], &[WAIT_ACQUIRE, READ_X], true),
        (&[WEAK_X, "fence.acq_rel.sys;", Y], &[WAIT_ACQUIRE, READ_X], false),
    ];
    for (writer, reader, race) in cases {
        races(&[&thread(writer), &thread(reader)], race);
    }
}

/// Causality order, rule 2, for weak accesses to the location of the flag itself.
#[test]
fn an_observed_write_precedes_what_follows_its_observer() {
    let reset = "st.global.u32 {y}, 0;";
    let plain = "ld.global.u32 %r1, {y};";
    let told = "WAIT: ld.acquire.gpu.global.u32 %r0, {z}; setp.eq.u32 %p1, %r0, 0; @%p1 bra WAIT;";
    let tell = "st.release.gpu.global.u32 {z}, 1;";
    for flag in [Y, "red.relaxed.gpu.global.add.u32 {y}, 1;", "atom.relaxed.gpu.global.exch.b32 %r2, {y}, 1;"]
    {
        races(&[flag, &thread(&[WAIT_RELAXED, reset])], false);
        races(&[flag, &thread(&[WAIT_RELAXED, plain])], false);
        // The observer tells a third thread, with or without a release.
        races(&[flag, &thread(&[WAIT_RELAXED, tell]), &thread(&[told, reset])], false);
        races(
            &[flag, &thread(&[WAIT_RELAXED, "st.relaxed.gpu.global.u32 {z}, 1;"]), &thread(&[told, reset])],
            true,
        );
        // Accesses before the write in program order are not ordered before the observer.
        races(&[&thread(&[WEAK_X, flag]), &thread(&[WAIT_RELAXED, reset, READ_X])], true);
        // A read of another scope or another width observes nothing.
        let narrow = WAIT_RELAXED.replace("gpu", "cta");
        races(&[flag, &thread(&[&narrow, reset])], true);
        races_in_clusters(2, &[flag, &thread(&[&WAIT_RELAXED.replace("gpu", "cluster"), reset])], false);
        let half = WAIT_RELAXED.replace("u32 %r0", "u16 %r0");
        races(&[flag, &thread(&[&half, reset])], true);
    }
}

/// A chain of atomics is observed to its beginning; a store ends the chain.
#[test]
fn chains_of_atomics() {
    let add = "atom.relaxed.gpu.global.add.u32 %r2, {y}, 1;";
    let red = "red.relaxed.gpu.global.add.u32 {y}, 1;";
    let all = "WAIT: ld.relaxed.gpu.global.u32 %r0, {y}; setp.ne.u32 %p1, %r0, 3; @%p1 bra WAIT; st.global.u32 {y}, 0;";
    races(&[add, add, add, all], false);
    races(&[red, red, red, all], false);
    races(&[red, add, red, all], false);
    let narrow = add.replace("gpu", "cta");
    races(&[add, &narrow, add, all], true);
    // The second thread overwrites what the first one wrote, and the third observes the overwriting store.
    let store = "WAIT: ld.relaxed.gpu.global.u32 %r0, {z}; setp.eq.u32 %p1, %r0, 0; @%p1 bra WAIT; \
                 st.relaxed.gpu.global.u32 {y}, 3; st.relaxed.gpu.global.u32 {z}, 2;";
    let once = "WAIT: ld.relaxed.gpu.global.u32 %r0, {z}; setp.ne.u32 %p1, %r0, 2; @%p1 bra WAIT; \
                ld.relaxed.gpu.global.u32 %r1, {y}; st.global.u32 {y}, 0;";
    let tells = thread(&[red, "st.relaxed.gpu.global.u32 {z}, 1;"]);
    races(&[&tells, store, once], true);
    races(&[&tells.replace(red, ""), store, once], false);
    // A compare-and-swap that fails writes nothing, so nothing observes it.
    let fails = "atom.release.gpu.global.cas.b32 %r2, {y}, 7, 8;";
    races(&[&thread(&[WEAK_X, fails, Y]), &thread(&[WAIT_ACQUIRE, READ_X])], true);
    races(&[fails, "ld.global.u32 %r0, {y};"], false);
}
