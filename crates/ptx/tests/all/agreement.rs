//! Tests that the verifier and NVIDIA's assembler agree on which instructions are valid. Thousands of
//! one-line forms of the sm_90a instructions, valid and invalid, must get the same verdict from both. Without
//! `FLASHCORE_PTXAS` nothing is compared.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use flashcore_ptx::{Rule, parse};

/// `sm_90a` needs `.version` 8.0. Forms of `.version` 8.7 are those of `sm_100a`.
fn target(version: &str) -> &'static str {
    match version {
        "8.7" => "sm_100a",
        _ if version < "8.0" => "sm_90",
        _ => "sm_90a",
    }
}

/// A kernel with registers of every kind, then the forms, one per line.
fn text(version: &str, forms: &[&str]) -> String {
    format!("{}{}\nret;\n}}\n", prelude(version), forms.join("\n"))
}

fn prelude(version: &str) -> String {
    let target = target(version);
    let wide = if version < "8.3" { "" } else { ".reg .b128 x<2>;\n" };
    format!(
        ".version {version}
.target {target}
.address_size 64
.visible .entry kernel()
{{
.reg .pred p, q;
.reg .b16 h<4>;
.reg .b32 r<200>;
.reg .b64 d<8>;
.reg .f32 f<200>;
.reg .f64 g<4>;
.reg .s32 i<200>;
{wide}.shared .align 128 .b8 tile[1024];
.shared .align 8 .b64 bar;
"
    )
}

/// The error of the verifier or the parser for a form, if any.
fn refused(version: &str, form: &str) -> Option<String> {
    let module = match parse(&text(version, &[form])) {
        Ok(module) => module,
        Err(error) => return Some(error.to_string()),
    };
    let violations = module.check().map_or_else(|found| found.0, |()| Vec::new());
    violations
        .into_iter()
        .find(|violation| violation.rule != Rule::Undefined)
        .map(|violation| violation.to_string())
}

/// The error of ptxas for each form that it rejects. ptxas stops at some errors before it has looked for
/// others, so the forms without an error are assembled again until ptxas accepts all that remain.
fn refused_by(ptxas: &Path, version: &str, forms: &[&str]) -> BTreeMap<usize, String> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name =
        format!("flashcore-agreement-{}-{}.ptx", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let source = std::env::temp_dir().join(name);
    let first_line = prelude(version).lines().count() + 1;
    let mut left: Vec<usize> = (0..forms.len()).collect();
    let mut refused = BTreeMap::new();
    loop {
        let lines: Vec<&str> = left.iter().map(|&i| forms[i]).collect();
        std::fs::write(&source, text(version, &lines)).expect("a temporary file");
        let run = Command::new(ptxas)
            .args(["-arch", target(version), "-o"])
            .arg(source.with_extension("cubin"))
            .arg(&source)
            .output()
            .expect("ptxas runs");
        if run.status.success() {
            break;
        }
        let said = String::from_utf8_lossy(&run.stderr).into_owned() + &String::from_utf8_lossy(&run.stdout);
        let before = refused.len();
        for (line, message) in said.lines().filter_map(complaint) {
            if let Some(&form) = line.checked_sub(first_line).and_then(|i| left.get(i)) {
                refused.entry(form).or_insert(message);
            }
        }
        assert!(refused.len() > before, "ptxas refuses what it does not name:\n{said}");
        left.retain(|form| !refused.contains_key(form));
    }
    for file in [&source, &source.with_extension("cubin")] {
        std::fs::remove_file(file).expect("a temporary file");
    }
    refused
}

/// Parses `ptxas FILE, line 12; error : …`.
fn complaint(line: &str) -> Option<(usize, String)> {
    let (_, rest) = line.split_once(", line ")?;
    let (number, message) = rest.split_once(';')?;
    Some((number.parse().ok()?, message.trim().to_owned()))
}

fn agree(version: &str, forms: &[String]) {
    let Some(ptxas) = std::env::var_os("FLASHCORE_PTXAS") else {
        eprintln!("FLASHCORE_PTXAS is not set: nothing is compared");
        return;
    };
    let forms: Vec<&str> = forms.iter().map(String::as_str).collect();
    let theirs = refused_by(Path::new(&ptxas), version, &forms);
    let differences: Vec<String> = forms
        .iter()
        .enumerate()
        .filter_map(|(i, form)| match (refused(version, form), theirs.get(&i)) {
            (Some(ours), None) => Some(format!("ptxas takes `{form}`; we say: {ours}")),
            (None, Some(theirs)) => Some(format!("we take `{form}`; ptxas says: {theirs}")),
            _ => None,
        })
        .collect();
    let (count, shown) =
        (differences.len(), differences.iter().take(20).cloned().collect::<Vec<_>>().join("\n"));
    assert!(differences.is_empty(), "{count} of {} forms, .version {version}:\n{shown}", forms.len());
    let taken = forms.len() - theirs.len();
    assert!(taken > 0 && !theirs.is_empty(), "{taken} of {} forms are taken: not both kinds", forms.len());
}

const VERSIONS: [&str; 4] = ["7.8", "8.0", "8.1", "8.6"];

/// A register that can hold the type.
fn register(ty: &str) -> &'static str {
    match ty {
        "b16" | "u16" | "f16" | "bf16" => "h0",
        "b64" | "u64" | "s64" => "d4",
        "f32" => "f0",
        "f64" => "g0",
        _ => "r4",
    }
}

const TYPES: [&str; 16] = [
    "b8", "b16", "u16", "b32", "u32", "s32", "b64", "u64", "s64", "f16", "bf16", "f16x2", "bf16x2", "f32",
    "f64", "tf32",
];
const OPERATIONS: [&str; 10] = ["and", "or", "xor", "add", "inc", "dec", "min", "max", "exch", "cas"];

fn list(prefix: &str, count: usize) -> String {
    let names: Vec<String> = (0..count).map(|i| format!("{prefix}{i}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// The text of one product. `tail` follows `scale-d`.
fn product(
    columns: usize,
    k: usize,
    [d, a, b]: [&str; 3],
    from_shared: bool,
    modifier: &str,
    tail: &str,
) -> String {
    let sums = match d {
        "f32" => list("f", columns / 2),
        "s32" => list("i", columns / 2),
        _ => list("r", columns / 4),
    };
    let a_operand = if from_shared { "d0" } else { "{r190, r191, r192, r193}" };
    let bits = if a == "b1" { ".and.popc" } else { "" };
    let name = format!("wgmma.mma_async.sync.aligned.m64n{columns}k{k}.{d}.{a}.{b}{bits}{modifier}");
    format!("{name} {sums}, {a_operand}, d1, p{tail};")
}

/// The operands of floating-point products after `scale-d`.
fn tail(a: &str, from_shared: bool) -> &'static str {
    match (a, from_shared) {
        ("f16" | "bf16", true) => ", 1, 1, 0, 0",
        ("f16" | "bf16", false) => ", 1, 1, 0",
        ("tf32" | "e4m3" | "e5m2", _) => ", 1, 1",
        _ => "",
    }
}

#[test]
fn products_of_warpgroups() {
    let inputs = ["f16", "bf16", "tf32", "e4m3", "e5m2", "u8", "s8", "b1", "u4", "f32"];
    let mut forms = Vec::new();
    for from_shared in [true, false] {
        for a in inputs {
            for b in inputs {
                for d in ["f32", "f16", "s32"] {
                    for k in [8, 16, 32] {
                        forms.push(product(32, k, [d, a, b], from_shared, "", tail(a, from_shared)));
                    }
                }
            }
            for more in [
                "",
                ", 1, 1",
                ", -1, 1",
                ", 1, 0",
                ", 2, 1",
                ", 1, 1, 1",
                ", 1, 1, 0, 1",
                ", 1, 1, 2, 0",
                ", p, 1, 1, 0",
            ] {
                forms.push(product(32, 16, ["f32", a, a], from_shared, "", more));
                forms.push(product(32, 32, ["f32", a, a], from_shared, "", more));
                forms.push(product(32, 32, ["s32", a, a], from_shared, "", more));
            }
        }
    }
    for (d, a, k) in [
        ("f32", "f16", 16),
        ("f16", "f16", 16),
        ("f32", "tf32", 8),
        ("f16", "e4m3", 32),
        ("s32", "s8", 32),
        ("s32", "b1", 256),
    ] {
        forms.extend((0..=264).step_by(4).map(|n| product(n, k, [d, a, a], true, "", tail(a, true))));
        forms.push(product(64, k, [d, a, a], true, ".satfinite", tail(a, true)));
    }
    let groups = ["fence.sync.aligned", "commit_group.sync.aligned", "wait_group.sync.aligned"];
    for name in groups {
        forms.extend(
            ["", " 0", " 7", " -1", " r0", " 0, 0"].map(|operands| format!("wgmma.{name}{operands};")),
        );
    }
    forms.extend(["wgmma.fence;", "wgmma.wait_group.aligned 0;"].map(String::from));
    for version in ["8.0", "8.4"] {
        agree_some(version, &forms);
    }
}

/// Like [`agree`], for versions in which every form may be invalid.
fn agree_some(version: &str, forms: &[String]) {
    let known_and_not = ["mov.b32 r0, r1;", "mov.b32 r0, d1;"].map(String::from);
    let forms: Vec<String> = forms.iter().cloned().chain(known_and_not).collect();
    agree(version, &forms);
}

#[test]
fn barriers_that_count_bytes() {
    let orderings = [
        "",
        ".release.cta",
        ".release.cluster",
        ".relaxed.cta",
        ".relaxed.cluster",
        ".acquire.cta",
        ".acquire.cluster",
        ".release.gpu",
        ".acquire.sys",
        ".acq_rel.cta",
        ".release",
        ".cta",
    ];
    let operations = [
        ("init", "", ", 1"),
        ("init", "", ", r1"),
        ("init", "", ", 0"),
        ("init", "", ", 1048576"),
        ("init", "", ""),
        ("inval", "", ""),
        ("expect_tx", "", ", 16"),
        ("expect_tx", "", ", r1"),
        ("expect_tx", "", ""),
        ("complete_tx", "", ", 16"),
        ("arrive", "_, ", ""),
        ("arrive", "d1, ", ""),
        ("arrive", "r1, ", ""),
        ("arrive", "_, ", ", 2"),
        ("arrive", "", ""),
        ("arrive.expect_tx", "_, ", ", 16"),
        ("arrive.expect_tx", "d1, ", ", r1"),
        ("arrive.expect_tx", "_, ", ""),
        ("arrive.noComplete", "d1, ", ", 1"),
        ("arrive.noComplete", "d1, ", ""),
        ("arrive_drop", "_, ", ""),
        ("arrive_drop", "d1, ", ", r1"),
        ("arrive_drop.expect_tx", "_, ", ", 16"),
        ("arrive_drop.noComplete", "d1, ", ", 1"),
        ("test_wait", "p, ", ", d2"),
        ("test_wait", "p, ", ", r2"),
        ("test_wait", "p, ", ", d2, 5"),
        ("test_wait.parity", "p, ", ", r2"),
        ("try_wait", "p, ", ", d2"),
        ("try_wait", "p, ", ", d2, 5"),
        ("try_wait", "p, ", ", d2, r5"),
        ("try_wait.parity", "p, ", ", r2"),
        ("try_wait.parity", "p, ", ", r2, 5"),
        ("try_wait.parity", "r1, ", ", r2"),
        ("arrive.parity", "_, ", ""),
    ];
    let mut forms = Vec::new();
    for (name, before, after) in operations {
        for (space, at) in [
            ("", "d0"),
            (".shared", "r0"),
            (".shared::cta", "bar"),
            (".shared::cluster", "r0"),
            (".global", "d0"),
        ] {
            forms.extend(orderings.map(|o| format!("mbarrier.{name}{o}{space}.b64 {before}[{at}]{after};")));
        }
    }
    for version in ["8.0", "8.6"] {
        agree(version, &forms);
    }
}

#[test]
fn bulk_copies() {
    let places = [
        (".shared::cluster", "r0"),
        (".shared::cta", "tile"),
        (".global", "d0"),
        (".local", "d0"),
        ("", "d0"),
    ];
    let mut forms = Vec::new();
    for (to, at) in places {
        for (from, source) in places {
            for (end, bar) in [(".mbarrier::complete_tx::bytes", ", [bar]"), (".bulk_group", ""), ("", "")] {
                for (more, operands) in [
                    ("", ""),
                    (".multicast::cluster", ", h0"),
                    (".L2::cache_hint", ", d4"),
                    (".multicast::cluster.L2::cache_hint", ", h0, d4"),
                    (".multicast::cluster", ""),
                    ("", ", d4"),
                    (".L2::cache_hint", ", r4"),
                ] {
                    let plain = format!("{to}{from}{end}{more}");
                    forms.push(format!("cp.async.bulk{plain} [{at}], [{source}], 64{bar}{operands};"));
                    let load = format!("[{at}], [d0, {{r1, r2}}]{bar}{operands}");
                    let store = format!("[d0, {{r1, r2}}], [{source}]{bar}{operands}");
                    forms.push(format!(
                        "cp.async.bulk.tensor.2d{plain} {};",
                        if to == ".global" { store } else { load }
                    ));
                }
            }
        }
    }
    let load = "shared::cluster.global.mbarrier::complete_tx::bytes";
    for (dims, coords) in [
        ("1d", "{r1}"),
        ("1d", "r1"),
        ("2d", "{r1, 0}"),
        ("2d", "{r1}"),
        ("3d", "{r1, i2, -4}"),
        ("4d", "{r1, r2, r3, r4}"),
        ("5d", "{r1, r2, r3, r4, r5}"),
        ("5d", "{r1, r2, r3, r4}"),
        ("6d", "{r1, r2, r3, r4, r5, r6}"),
        ("2d", "{d1, d2}"),
        ("2d", "{r1, r2, r3}"),
    ] {
        forms.push(format!("cp.async.bulk.tensor.{dims}.{load} [tile], [d0, {coords}], [bar];"));
        forms.push(format!("cp.async.bulk.tensor.{dims}.shared::cluster.global.tile.mbarrier::complete_tx::bytes [tile], [d0, {coords}], [bar];"));
        forms.push(format!(
            "cp.async.bulk.tensor.{dims}.global.shared::cta.bulk_group [d0, {coords}], [tile];"
        ));
        forms.push(format!(
            "cp.reduce.async.bulk.tensor.{dims}.global.shared::cta.add.bulk_group [d0, {coords}], [tile];"
        ));
        forms.push(format!("cp.async.bulk.prefetch.tensor.{dims}.L2.global [d0, {coords}];"));
        forms.push(format!(
            "cp.async.bulk.prefetch.tensor.{dims}.L2.global.L2::cache_hint [d0, {coords}], d4;"
        ));
    }
    forms.extend(
        ["16", "r1", "24", "-16", "d1", "4"]
            .map(|size| format!("cp.async.bulk.{load} [tile], [d0], {size}, [bar];")),
    );
    forms.extend(["16", "r1", "24"].map(|size| format!("cp.async.bulk.prefetch.L2.global [d0], {size};")));
    forms.extend(["", ".read"].map(|read| format!("cp.async.bulk.wait_group{read} 3;")));
    forms.extend(
        ["cp.async.bulk.commit_group;", "cp.async.bulk.wait_group;", "cp.async.bulk.wait_group r0;"]
            .map(String::from),
    );
    forms.push(format!("cp.async.bulk.tensor.2d.{load} [tile], [d0+64, {{r1, r2}}], [bar];"));
    for version in VERSIONS {
        agree_some(version, &forms);
    }
}

#[test]
fn reductions_and_stores_to_the_cluster() {
    let mut forms = Vec::new();
    for ty in TYPES {
        let value = register(ty);
        for op in OPERATIONS {
            for noftz in ["", ".noftz"] {
                let (what, bar) = (format!("{op}{noftz}.{ty}"), ".mbarrier::complete_tx::bytes");
                forms.push(format!(
                    "cp.reduce.async.bulk.shared::cluster.shared::cta{bar}.{what} [r0], [tile], 64, [r1];"
                ));
                forms.push(format!(
                    "cp.reduce.async.bulk.global.shared::cta.bulk_group.{what} [d0], [tile], 64;"
                ));
                forms.push(format!("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.{what} [d0], [tile], 64, d4;"));
                forms.push(format!(
                    "red.async.relaxed.cluster.shared::cluster{bar}.{what} [r0], {value}, [r1];"
                ));
            }
        }
        for (vector, count) in [("", 1), (".v2", 2), (".v4", 4), (".v8", 8)] {
            let values = vec![value; count].join(", ");
            let values = if count == 1 { values } else { format!("{{{values}}}") };
            // ptxas also accepts `.shared::cta`, which the PTX ISA does not list.
            for space in ["", ".shared::cluster", ".global"] {
                let at = if space.is_empty() || space == ".global" { ["d0", "d1"] } else { ["r0", "r1"] };
                let end = format!(
                    "{space}.mbarrier::complete_tx::bytes{vector}.{ty} [{}], {values}, [{}];",
                    at[0], at[1]
                );
                forms.push(format!("st.async{end}"));
                forms.push(format!("st.async.weak{end}"));
            }
        }
    }
    for op in OPERATIONS {
        forms.push(format!(
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.bulk_group [d0, {{r1, r2}}], [tile];"
        ));
        forms.push(format!("cp.reduce.async.bulk.tensor.2d.shared::cluster.global.{op}.mbarrier::complete_tx::bytes [tile], [d0, {{r1, r2}}], [bar];"));
    }
    for version in VERSIONS {
        agree_some(version, &forms);
    }
}

#[test]
fn clusters_fences_and_roles() {
    let mut forms = Vec::new();
    for scope in ["cta", "cluster", "gpu", "sys", "all"] {
        for (sem, operands) in [
            ("acquire", " [d0], 128"),
            ("release", ""),
            ("acquire", ""),
            ("release", " [d0], 128"),
            ("sc", ""),
            ("acquire", " [d0], 64"),
        ] {
            forms.push(format!("fence.proxy.tensormap::generic.{sem}.{scope}{operands};"));
        }
    }
    for sem in ["", ".acquire", ".release", ".acq_rel", ".sc"] {
        for scope in ["cta", "cluster", "gpu"] {
            for restriction in ["", ".sync_restrict::shared::cta", ".sync_restrict::shared::cluster"] {
                forms.push(format!("fence{sem}{restriction}.{scope};"));
            }
        }
    }
    for space in ["", ".global", ".shared::cta", ".shared::cluster", ".local"] {
        forms.push(format!("fence.proxy.async{space};"));
        forms.push(format!("prefetch{space}.tensormap [d0];"));
        for ty in ["u32", "u64", "b32"] {
            let (d, a) = if ty == "u64" { ("d1", "d0") } else { ("r1", "r0") };
            forms.push(format!("mapa{space}.{ty} {d}, {a}, r2;"));
            forms.push(format!("mapa{space}.{ty} {d}, {a}, 1;"));
            forms.push(format!("getctarank{space}.{ty} r3, {a};"));
        }
    }
    for registers in ["0", "16", "24", "100", "232", "256", "264", "r1"] {
        forms.extend(
            ["inc", "dec"].map(|change| format!("setmaxnreg.{change}.sync.aligned.u32 {registers};")),
        );
    }
    for name in [
        "arrive",
        "arrive.release",
        "arrive.relaxed",
        "arrive.acquire",
        "wait",
        "wait.acquire",
        "wait.release",
    ] {
        forms.extend(["", ".aligned"].map(|aligned| format!("barrier.cluster.{name}{aligned};")));
    }
    forms.extend(
        [
            "elect.sync r0|p, -1;",
            "elect.sync _|p, r1;",
            "elect.sync r0, -1;",
            "elect.sync p, -1;",
            "griddepcontrol.wait;",
            "griddepcontrol.launch_dependents;",
            "griddepcontrol.wait 1;",
            "fence.mbarrier_init.release.cluster;",
            "fence.mbarrier_init;",
            "fence.acq_rel.cluster;",
            "fence.proxy.alias;",
            "fence.proxy.generic;",
        ]
        .map(String::from),
    );
    for version in ["8.0", "8.3"] {
        agree(version, &forms);
    }
    // `.release` and `.acquire` are the defaults and need 8.0. The model does not store them, so the verifier
    // does not reject them in 7.8.
    let said = |form: &String| form.contains("arrive.release") || form.contains("wait.acquire");
    forms.retain(|form| !said(form));
    agree("7.8", &forms);
}

/// Operands `{r0, r1, …}`.
fn vector(count: usize) -> String {
    format!("{{{}}}", (0..count).map(|i| format!("r{i}")).collect::<Vec<_>>().join(", "))
}

#[test]
fn tensor_memory_agrees() {
    let mut forms: Vec<String> = Vec::new();
    for (shape, registers) in [("32x32b", 1), ("16x64b", 1), ("16x128b", 2), ("16x256b", 4), ("16x32bx2", 1)]
    {
        let distance = if shape == "16x32bx2" { ", 16" } else { "" };
        for repeat in [1, 2, 32, 64, 128, 3] {
            let r = vector((registers * repeat).min(128));
            forms.push(format!("tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {r}, [r1]{distance};"));
            forms.push(format!("tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [r1+4]{distance}, {r};"));
        }
        let r = vector(2 * registers);
        forms.extend([
            format!("tcgen05.ld.sync.aligned.{shape}.x2.pack::16b.b32 {r}, [r1]{distance};"),
            format!("tcgen05.st.sync.aligned.{shape}.x2.unpack::16b.b32 [r1]{distance}, {r};"),
            format!("tcgen05.ld.sync.aligned.{shape}.x4.b32 {r}, [r1]{distance};"),
        ]);
    }
    for form in [
        "wait::ld.sync.aligned",
        "wait::st.sync.aligned",
        "wait::ld",
        "fence::before_thread_sync",
        "fence::after_thread_sync",
    ] {
        forms.push(format!("tcgen05.{form};"));
    }
    agree("8.7", &forms);
    // All instructions of a function name one group.
    for group in ["cta_group::1", "cta_group::2"] {
        let mut forms: Vec<String> = Vec::new();
        for columns in ["32", "512", "48", "16", "1024", "r2"] {
            forms.push(format!("tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [tile], {columns};"));
            forms.push(format!("tcgen05.dealloc.{group}.sync.aligned.b32 r1, {columns};"));
        }
        forms.extend([
            format!("tcgen05.alloc.{group}.sync.aligned.b32 [d0], 64;"),
            format!("tcgen05.alloc.{group}.sync.aligned.shared::cluster.b32 [r0], 64;"),
            format!("tcgen05.relinquish_alloc_permit.{group}.sync.aligned;"),
            format!("tcgen05.commit.{group}.mbarrier::arrive::one.b64 [d0];"),
            format!("tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster.b64 [r0];"),
            format!("tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [r0], h0;"),
            format!("tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [r0];"),
            format!("tcgen05.cp.{group}.128x256b [r1], d0;"),
            format!("tcgen05.cp.{group}.64x128b.warpx2::02_13 [r1], d0;"),
            format!("tcgen05.cp.{group}.32x128b.warpx4 [r1], d0;"),
            format!("tcgen05.cp.{group}.32x128b [r1], d0;"),
            format!("tcgen05.cp.{group}.128x128b.b8x16.b4x16_p64 [r1], d0;"),
            format!("tcgen05.shift.{group}.down [r1];"),
        ]);
        for kind in ["f16", "tf32", "f8f6f4", "i8"] {
            let mask = vector(if group == "cta_group::1" { 4 } else { 8 });
            // ptxas takes any `scale-input-d` with integers, where the PTX ISA has none.
            let scales = if kind == "i8" { [""; 3] } else { ["", ", 3", ", 16"] };
            for (a, scale) in [("[r2]", ""), ("r2", "")].into_iter().chain(scales.map(|scale| ("d0", scale)))
            {
                forms.push(format!("tcgen05.mma.{group}.kind::{kind} [r1], {a}, d1, r3, p{scale};"));
                forms.push(format!("tcgen05.mma.{group}.kind::{kind} [r1], {a}, d1, r3, {mask}, p{scale};"));
            }
            forms.push(format!("tcgen05.mma.{group}.kind::{kind}.collector::a::fill [r1], d0, d1, r3, p;"));
            forms.push(format!("tcgen05.mma.ws.{group}.kind::{kind} [r1], d0, d1, r3, p;"));
            forms.push(format!(
                "tcgen05.mma.ws.{group}.kind::{kind}.collector::b1::use [r1], [r2], d1, r3, p, d2;"
            ));
        }
        for kind in ["mxf8f6f4", "mxf4", "mxf4nvf4", "f16"] {
            for scales in ["", ".scale_vec::1X", ".scale_vec::2X", ".scale_vec::4X"] {
                forms.push(format!(
                    "tcgen05.mma.{group}.kind::{kind}.block_scale{scales} [r1], d0, d1, r3, [r4], [r5], p;"
                ));
            }
        }
        agree("8.7", &forms);
    }
}

#[test]
fn cancelled_clusters_agree() {
    let mut forms: Vec<String> = Vec::new();
    for form in [
        "shared::cta.mbarrier::complete_tx::bytes.b128 [tile], [bar]",
        "shared::cta.mbarrier::complete_tx::bytes.b128 [r0], [r1+8]",
        "mbarrier::complete_tx::bytes.b128 [d0], [d1]",
        "shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [tile], [bar]",
        "shared::cluster.mbarrier::complete_tx::bytes.b128 [r0], [r1]",
        "shared::cta.mbarrier::complete_tx::bytes.b64 [r0], [r1]",
        "shared::cta.mbarrier::complete_tx::bytes.b128 [r0]",
        "shared::cta.b128 [r0], [r1]",
    ] {
        forms.push(format!("clusterlaunchcontrol.try_cancel.async.{form};"));
    }
    for form in [
        "is_canceled.pred.b128 p, x0",
        "is_canceled.pred.b128 r0, x0",
        "is_canceled.pred.b128 p, d0",
        "is_canceled.b128 p, x0",
        "get_first_ctaid.v4.b32.b128 {r0, r1, r2, r3}, x0",
        "get_first_ctaid.v4.b32.b128 {r0, _, r2, _}, x0",
        "get_first_ctaid.v4.b32.b128 {r0, r1, r2}, x0",
        "get_first_ctaid::x.b32.b128 r0, x0",
        "get_first_ctaid::y.b32.b128 r0, x0",
        "get_first_ctaid::z.b32.b128 r0, x0",
        "get_first_ctaid::z.b32.b128 d0, x0",
        "get_first_ctaid::w.b32.b128 r0, x0",
        "get_first_ctaid.b32.b128 r0, x0",
    ] {
        forms.push(format!("clusterlaunchcontrol.query_cancel.{form};"));
    }
    for form in [
        "acquire.sync_restrict::shared::cluster.cluster",
        "release.sync_restrict::shared::cta.cluster",
        "acquire.sync_restrict::shared::cta.cluster",
        "acquire.sync_restrict::shared::cluster.gpu",
        "release.cluster",
    ] {
        forms.push(format!("fence.proxy.async::generic.{form};"));
    }
    for version in ["8.3", "8.7"] {
        agree_some(version, &forms);
    }
}

#[test]
fn changes_of_tensor_maps_agree() {
    let mut forms: Vec<String> = Vec::new();
    for (field, operands) in [
        ("global_address", "d0"),
        ("rank", "r0"),
        ("rank", "3"),
        ("rank", "d0"),
        ("box_dim", "0, r0"),
        ("box_dim", "r1, r0"),
        ("global_dim", "4, 64"),
        ("global_dim", "5, 64"),
        ("global_stride", "0, d0"),
        ("global_stride", "0, r0"),
        ("element_stride", "1, r0"),
        ("element_stride", "r0"),
        ("elemtype", "12"),
        ("elemtype", "r0"),
        ("interleave_layout", "2"),
        ("interleave_layout", "3"),
        ("swizzle_mode", "3"),
        ("swizzle_mode", "5"),
        ("fill_mode", "1"),
        ("fill_mode", "2"),
        ("swizzle_atomicity", "3"),
        ("swizzle_atomicity", "4"),
        ("address", "d0"),
    ] {
        for (space, base) in [
            ("", "d1"),
            (".global", "d1"),
            (".shared::cta", "tile"),
            (".shared::cta", "r1+128"),
            (".shared::cluster", "r1"),
            (".shared", "r1"),
        ] {
            for ty in ["b32", "b64"] {
                forms.push(format!("tensormap.replace.tile.{field}{space}.b1024.{ty} [{base}], {operands};"));
            }
        }
    }
    for (scope, operands) in [
        ("release.cta.sync.aligned", "[d0], [tile], 128"),
        ("release.cluster.sync.aligned", "[d0], [r0], 128"),
        ("release.gpu.sync.aligned", "[d0+128], [tile+128], 128"),
        ("release.sys.sync.aligned", "[d0], [tile], 128"),
        ("release.gpu.sync.aligned", "[d0], [tile], 64"),
        ("release.gpu.sync.aligned", "[d0], [tile], r0"),
        ("release.gpu.sync", "[d0], [tile], 128"),
        ("acquire.gpu.sync.aligned", "[d0], [tile], 128"),
    ] {
        let name = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic";
        forms.push(format!("{name}.{scope} {operands};"));
    }
    for version in ["8.2", "8.3", "8.7"] {
        agree_some(version, &forms);
    }
}
