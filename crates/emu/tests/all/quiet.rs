//! Tests of quiet buffers, which a kernel seems only to read: their reads are not recorded, and a store to
//! one of them must not change the findings.

use flashcore_emu::{Buffer, HazardKind, Options, Report, Survey, argument_bytes, run};
use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, Launch};

/// Runs four CTAs of 32 threads with buffers `a` (contents 1), `b` (contents 2) and `t`, which holds the
/// address of `a`.
fn execute(body: &str, options: &Options) -> (Report, Vec<u8>) {
    let text = format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 t)\n{{\n\
         .reg .b64 %rd<8>;\n.reg .b32 %r<8>;\nld.param.u64 %rd1, [a];\nld.param.u64 %rd2, [b];\n\
         ld.param.u64 %rd3, [t];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd4, %r1, 4;\nadd.u64 %rd1, %rd1, %rd4;\n\
         add.u64 %rd2, %rd2, %rd4;\n{body}\nret;\n}}\n"
    );
    let spec = |name: &str, bytes| BufferSpec { name: name.into(), bytes, access: Access::ReadWrite };
    let kernel = Kernel {
        module: ptx::parse(&text).unwrap().verify().unwrap(),
        entry: "k".into(),
        launch: Launch::new(Dim3(4, 1, 1), Dim3(32, 1, 1)),
        buffers: vec![spec("a", 128), spec("b", 128), spec("t", 8)],
        tensor_maps: Vec::new(),
        args: (0..3).map(|index| Arg::Buffer { index, offset: 0 }).collect(),
    };
    let filled = |value: u32| Buffer::from_bytes(&[value; 32].map(u32::to_le_bytes).concat());
    let pointer = argument_bytes(&Arg::Buffer { index: 0, offset: 0 });
    let mut buffers = [filled(1), filled(2), Buffer::from_bytes(&pointer)];
    let report = run(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), options).unwrap();
    (report, buffers[0].to_bytes())
}

#[test]
fn a_store_through_a_pointer_in_memory_still_races() {
    // The kernel reads `a` through the parameter, and stores to `a` through the pointer in `t`.
    let stores = "ld.global.u32 %r2, [%rd1];\nadd.u32 %r2, %r2, 1;\nld.global.u64 %rd5, [%rd3];\n\
        add.u64 %rd5, %rd5, %rd4;\nst.global.u32 [%rd5], %r2;";
    let (report, _) = execute(stores, &Options::default());
    assert!(report.hazards.iter().any(|hazard| hazard.kind == HazardKind::Race), "{:?}", report.hazards);
    // A single CTA does not race. The second run begins with the buffer contents of the first.
    let one = Options { only: Some(vec![2]), survey: true, ..Options::default() };
    let (report, a) = execute(stores, &one);
    assert_eq!((report.hazards.as_slice(), a), (&[][..], [2u32; 32].map(u32::to_le_bytes).concat()));
}

#[test]
fn stores_through_parameters_race_and_reads_do_not() {
    let reads = "ld.global.u32 %r2, [%rd1];\nld.global.u32 %r3, [%rd2];\nadd.u32 %r2, %r2, %r3;";
    let (report, _) = execute(reads, &Options::default());
    assert_eq!(report.hazards, []);
    let stores = "ld.global.u32 %r2, [%rd2];\nld.global.u32 %r3, [%rd1];\nst.global.u32 [%rd1], %r2;";
    let (report, _) = execute(stores, &Options::default());
    assert!(report.hazards.iter().any(|hazard| hazard.kind == HazardKind::Race), "{:?}", report.hazards);
    let beyond = "ld.global.u32 %r2, [%rd2+4];";
    let (report, _) = execute(beyond, &Options::default());
    assert_eq!(report.hazards[0].kind, HazardKind::OutOfBounds, "{:?}", report.hazards);
}

#[test]
fn a_survey_tells_instructions_and_shared_lines() {
    // CTA c writes to eight elements of `a`; the four groups share one line. CTA 3 skips the last load.
    let body = ".reg .pred %p<3>;\nmov.u32 %r4, %ctaid.x;\nshr.u32 %r5, %r1, 3;\nsetp.eq.u32 %p1, %r4, %r5;\n\
        @%p1 st.global.u32 [%rd1], %r4;\nsetp.eq.u32 %p2, %r4, 3;\n@%p2 bra END;\nld.global.u32 %r6, [%rd2];\nEND:";
    let (report, _) = execute(body, &Options { survey: true, ..Options::default() });
    assert_eq!(report.hazards, []);
    let Survey { footprints, neighbours } = report.survey;
    assert_eq!(footprints.iter().map(|f| f.cta).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(footprints[0].executed, footprints[2].executed);
    assert_eq!(footprints[0].executed[0] & !footprints[3].executed[0], 1 << 13, "the load");
    assert_eq!(neighbours, [(0, 1), (1, 2), (2, 3)]);
    let (report, _) = execute(body, &Options::default());
    assert_eq!(report.survey, Survey::default());
}
