//! Tests that the cost of registers depends on the registers that a kernel uses, not on those that it
//! declares.

use std::fmt::Write;

use flashcore_emu::{Buffer, EmuError, Options, Report, run};
use ptx::{Dim3, Kernel, Launch};

fn kernel(text: &str) -> Kernel {
    Kernel {
        module: ptx::parse(text).unwrap().verify().unwrap(),
        entry: "k".into(),
        launch: Launch::new(Dim3(1, 1, 1), Dim3(32, 1, 1)),
        buffers: Vec::new(),
        tensor_maps: Vec::new(),
        args: Vec::new(),
    }
}

fn execute(text: &str, grid_limit: u64) -> Result<Report, EmuError> {
    let no_buffers: &mut [&mut Buffer] = &mut [];
    run(&kernel(text), no_buffers, &Options { grid_limit, ..Options::default() })
}

/// A function with 2000 declared registers that calls itself 100 deep. `body` uses some of the registers.
fn recursion(body: &str) -> String {
    format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n\
         .func f(.param .b32 n)\n{{\n\
         .reg .b32 %r<2000>;\n.reg .pred %p;\n.param .b32 m;\n\
         ld.param.u32 %r0, [n];\nsetp.eq.u32 %p, %r0, 0;\n@%p ret;\n{body}\
         sub.u32 %r0, %r0, 1;\nst.param.b32 [m], %r0;\ncall.uni f, (m);\nret;\n}}\n\
         .visible .entry k()\n{{\n.param .b32 m;\nst.param.b32 [m], 100;\ncall.uni f, (m);\nret;\n}}\n"
    )
}

#[test]
fn a_recursion_pays_for_the_registers_that_it_keeps() {
    let unused = execute(&recursion(""), 2000).unwrap();
    assert!(unused.hazards.is_empty() && unused.steps < 1500, "{:?}", unused.hazards);
    // 200 000 instructions, and 2000 registers that are saved 99 times.
    let used: String = (1..2000).map(|i| format!("mov.u32 %r{i}, {i};\n")).collect();
    let limited = execute(&recursion(&used), 300_000).unwrap_err();
    assert!(matches!(limited, EmuError::GridLimit { .. }), "{limited}");
    assert!(execute(&recursion(&used), 500_000).unwrap().steps < 300_000);
}

#[test]
fn more_registers_than_slots_are_refused_where_they_are_used() {
    let mut text = String::from(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n.reg .b64 %rd<65535>;\n",
    );
    // The frame pointer uses the one remaining slot.
    for i in 0..65535 {
        writeln!(text, "mov.u64 %rd{i}, 0;").unwrap();
    }
    text += "ret;\n}\n";
    let refused = execute(&text, u64::MAX).unwrap_err().to_string();
    assert!(refused.contains("more than 65535 registers"), "{refused}");
}
