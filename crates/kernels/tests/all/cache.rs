//! The kernel that writes keys and values into a cache, in the emulator, against plain loops.

use emu::{Emulator, Options};
use flashcore_kernels::Arch;
use flashcore_kernels::cache::{self, CacheWrite, HeadRows, LENGTHS, ROTATED, Rotation, RowPlaces};
use problem::{DType, Strides};
use ptx::Machine;

use crate::common::fp8::{edit_text, lines};
use crate::common::{decode, encode, loaded, stored};
use crate::tools;

/// An array by its name, with its element type if it holds floats.
type Arrays = Vec<(&'static str, Vec<u8>)>;

/// A dense tensor whose dimensions lie in the order `order` in memory: the slowest first.
fn rows(extents: [usize; 4], order: [usize; 3]) -> HeadRows {
    let mut strides = [0; 3];
    let mut next = extents[3] as i64;
    for &dim in order.iter().rev() {
        strides[dim] = next;
        next *= extents[dim] as i64;
    }
    let [batch, head, row] = strides;
    HeadRows { extents, strides: Strides { batch, head, row } }
}

const ENTRY_ROW_HEAD: [usize; 3] = [0, 2, 1];
const ENTRY_HEAD_ROW: [usize; 3] = [0, 1, 2];

/// A write of sequences and the contents of its arrays.
struct Case {
    write: CacheWrite,
    arrays: Arrays,
}

fn noise(state: &mut u64) -> f64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
}

impl Case {
    /// Random contents of all arrays; arrays of integers are `integers`.
    fn new(write: CacheWrite, integers: &[(&'static str, Vec<i64>)]) -> Case {
        let mut state = 7;
        let arrays = write.arrays().into_iter().map(|array| {
            let dtype = match array.name {
                "k" | "v" => write.to,
                "k_descale" | "v_descale" => DType::F32,
                "rotary_cos" | "rotary_sin" => write.rotation.unwrap().dtype,
                _ => write.from,
            };
            let wide = array.name == "slots" && write.places == RowPlaces::Slots { wide: true };
            if let Some((_, values)) = integers.iter().find(|(name, _)| *name == array.name) {
                let size = if wide { 8 } else { 4 };
                let bytes: Vec<u8> =
                    values.iter().flat_map(|n| n.to_le_bytes().into_iter().take(size)).collect();
                assert_eq!(bytes.len(), array.bytes, "{}", array.name);
                return (array.name, bytes);
            }
            let elements: Vec<u32> = (0..array.bytes / dtype.bytes())
                .map(|_| {
                    let x = noise(&mut state);
                    encode(dtype, if array.name.ends_with("descale") { 0.3 + x.abs() } else { x })
                })
                .collect();
            (array.name, stored(dtype, &elements))
        });
        Case { write, arrays: arrays.collect() }
    }

    fn bytes(&self, name: &str) -> &[u8] {
        &self.arrays.iter().find(|(other, _)| *other == name).unwrap().1
    }

    fn integers(&self, name: &str) -> Vec<i64> {
        self.bytes(name).chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect()
    }

    fn floats(&self, name: &str, dtype: DType) -> Vec<f32> {
        loaded(dtype, self.bytes(name)).into_iter().map(|bits| decode(dtype, bits) as f32).collect()
    }

    /// The arrays after the kernel, without the lines of its text that `drop` names, on a machine that
    /// reports every hazard.
    fn run(&self, drop: Option<fn(&str) -> bool>) -> Result<Arrays, String> {
        let mut program = cache::emit(&self.write, &Arch::SM_90).map_err(|error| error.to_string())?;
        if let Some(drop) = drop {
            edit_text(&mut program, |text| lines(text, |line, _| (!drop(line)).then(|| line.to_owned())));
        }
        let mut machine = Emulator::new(Options::default());
        let mut buffers = Vec::new();
        for (name, bytes) in &self.arrays {
            let mut buffer = machine.allocate(bytes.len()).unwrap();
            if !matches!(*name, LENGTHS | ROTATED) {
                machine.upload(&mut buffer, bytes).unwrap();
            }
            buffers.push(buffer);
        }
        let mut all: Vec<_> = buffers.iter_mut().collect();
        machine.launch(&program.kernel(0), &mut all).map_err(|error| error.to_string())?;
        let mut read = Vec::new();
        for ((name, bytes), buffer) in self.arrays.iter().zip(&buffers) {
            let mut to = vec![0; bytes.len()];
            machine.download(buffer, &mut to).unwrap();
            read.push((*name, to));
        }
        Ok(read)
    }

    /// The arrays that plain loops give.
    fn expected(&self) -> Arrays {
        let write = &self.write;
        let (from, to) = (write.from, write.to);
        let mut after = self.arrays.clone();
        let new = [self.floats("k_new", from), self.floats("v_new", from)];
        for entry in 0..write.new[0].extents[0] {
            for row in 0..write.new[0].extents[2] {
                let Some((sequence, index, place)) = self.place(entry, row) else { continue };
                for (i, name) in [(0, "k"), (1, "v")] {
                    let [_, heads, _, dim] = write.new[i].extents;
                    for head in 0..heads {
                        let at = write.new[i].strides.offset(entry, head, row) as usize;
                        let mut elements = new[i][at..at + dim].to_vec();
                        if i == 0 {
                            self.turn(&mut elements, sequence, index);
                        }
                        if let Some(strides) = write.factors[i] {
                            let factors = self.floats(["k_descale", "v_descale"][i], DType::F32);
                            let [of_batch, of_head] = strides.map(|stride| stride as usize);
                            let factor = factors[sequence * of_batch + head * of_head];
                            elements.iter_mut().for_each(|x| *x /= factor);
                        }
                        let at = write.caches[i].strides.offset(place[0], head, place[1]) as usize;
                        let bits: Vec<u32> = elements.iter().map(|&x| encode(to, x.into())).collect();
                        let array = &mut after.iter_mut().find(|(other, _)| *other == name).unwrap().1;
                        array[at * to.bytes()..][..dim * to.bytes()].copy_from_slice(&stored(to, &bits));
                    }
                }
            }
        }
        let mut set = |name: &str, bytes: Vec<u8>| {
            after
                .iter_mut()
                .filter(|(other, _)| *other == name)
                .for_each(|(_, array)| array.clone_from(&bytes));
        };
        if let RowPlaces::Sequences { batch, capacity, .. } = write.places {
            let lengths = (0..batch).map(|b| {
                let (start, end) = self.span(b);
                let used = self.integers("cache_seqlens")[b].clamp(0, capacity as i64);
                (used + (end - start).max(0)).min(capacity as i64) as i32
            });
            set(LENGTHS, lengths.flat_map(i32::to_le_bytes).collect());
        }
        if let Some(rotation) = write.rotation {
            let q = self.floats("q", from);
            let [entries, heads, count, dim] = rotation.queries.extents;
            let mut bits = Vec::new();
            for (entry, row) in (0..entries).flat_map(|entry| (0..count).map(move |row| (entry, row))) {
                let (sequence, index) = match rotation.packed {
                    false => (entry, row),
                    true => {
                        let starts = self.integers("cu_seqlens_q");
                        let sequence = starts.iter().rposition(|&start| start <= row as i64).unwrap();
                        (sequence, row - starts[sequence] as usize)
                    }
                };
                for head in 0..heads {
                    let at = rotation.queries.strides.offset(entry, head, row) as usize;
                    let mut elements = q[at..at + dim].to_vec();
                    self.turn(&mut elements, sequence, if rotation.local { index } else { 0 });
                    bits.extend(elements.iter().map(|&x| encode(from, x.into())));
                }
            }
            set(ROTATED, stored(from, &bits));
        }
        after
    }

    /// The new rows of a sequence, cut to the tensor.
    fn span(&self, sequence: usize) -> (i64, i64) {
        let rows = self.write.new[0].extents[2] as i64;
        match self.write.places {
            RowPlaces::Sequences { packed: true, .. } => {
                let starts = self.integers("cu_seqlens_k_new");
                (starts[sequence].clamp(0, rows), starts[sequence + 1].clamp(0, rows))
            }
            _ => (0, rows),
        }
    }

    /// The sequence of a new row, its index there, and its entry and row in the cache.
    fn place(&self, entry: usize, row: usize) -> Option<(usize, usize, [usize; 2])> {
        let [entries, _, entry_rows, _] = self.write.caches[0].extents;
        let RowPlaces::Sequences { batch, packed, pages, capacity } = self.write.places else {
            let slots = match self.write.places {
                RowPlaces::Slots { wide: true } => {
                    let slots = self.bytes("slots").chunks_exact(8);
                    slots.map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
                }
                _ => self.integers("slots"),
            };
            let slot = usize::try_from(slots[row]).ok().filter(|&slot| slot < entries * entry_rows)?;
            return Some((0, row, [slot / entry_rows, slot % entry_rows]));
        };
        let is_own = |&b: &usize| (self.span(b).0..self.span(b).1).contains(&(row as i64));
        let sequence = if packed { (0..batch).find(is_own)? } else { entry };
        let index = row - self.span(sequence).0 as usize;
        let used = self.integers("cache_seqlens")[sequence].clamp(0, capacity as i64) as usize;
        let at = Some(used + index).filter(|&at| at < capacity)?;
        let Some(pages) = pages else { return Some((sequence, index, [sequence, at])) };
        let page = self.integers("page_table")[sequence * pages + at / entry_rows];
        let page = usize::try_from(page).ok().filter(|&page| page < entries)?;
        Some((sequence, index, [page, at % entry_rows]))
    }

    fn turn(&self, row: &mut [f32], sequence: usize, index: usize) {
        let Some(rotation) = self.write.rotation else { return };
        let array = if rotation.has_positions { "rotary_seqlens" } else { "cache_seqlens" };
        let last = rotation.positions - 1;
        let first = self.integers(array)[sequence].clamp(0, last as i64) as usize;
        let at = (first + index).min(last);
        let [cos, sin] = ["rotary_cos", "rotary_sin"].map(|name| self.floats(name, rotation.dtype));
        for i in 0..rotation.pairs {
            let (a, b) = if rotation.interleaved { (2 * i, 2 * i + 1) } else { (i, i + rotation.pairs) };
            let [cos, sin] = [&cos, &sin].map(|table| table[at * rotation.strides[0] as usize + i]);
            (row[a], row[b]) = (row[a] * cos - row[b] * sin, row[a] * sin + row[b] * cos);
        }
    }

    fn check(&self) {
        let found = self.run(None).unwrap_or_else(|error| panic!("{:?}: {error}", self.write));
        for ((name, found), (_, expected)) in found.iter().zip(&self.expected()) {
            let first = found.iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(first, None, "{name} of {:?}", self.write);
        }
    }
}

/// Sequences of these lengths with `new` rows each, in pages of `page` rows or in entries of a dense cache.
struct Shape {
    lengths: Vec<i64>,
    new: usize,
    page: Option<usize>,
    heads: usize,
    dims: [usize; 2],
    from: DType,
    packed: bool,
    order: [usize; 3],
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            lengths: vec![0, 5, 17],
            new: 1,
            page: Some(16),
            heads: 2,
            dims: [64, 64],
            from: DType::F16,
            packed: false,
            order: ENTRY_ROW_HEAD,
        }
    }
}

impl Shape {
    fn case(&self, change: impl FnOnce(&mut CacheWrite, &mut Vec<(&'static str, Vec<i64>)>)) -> Case {
        let Shape { lengths, new, page, heads, dims, packed, .. } = self;
        let (batch, most) = (lengths.len(), *lengths.iter().max().unwrap() as usize + new);
        let per_sequence = page.map(|page| most.div_ceil(page).max(1));
        let entries = per_sequence.map_or(batch, |pages| pages * batch + 1);
        let (new_entries, new_rows) = if *packed { (1, batch * new) } else { (batch, *new) };
        let entry_rows = page.unwrap_or(most);
        let mut integers = vec![("cache_seqlens", lengths.clone())];
        if *packed {
            integers.push(("cu_seqlens_k_new", (0..=batch as i64).map(|b| b * *new as i64).collect()));
        }
        if let Some(pages) = per_sequence {
            let count = entries as i64;
            // A prime that is larger than the number of pages, so that no page stands twice.
            integers.push((
                "page_table",
                (0..(pages * batch) as i64).map(|i| (i * 10_007 + 3) % count).collect(),
            ));
        }
        let mut write = CacheWrite {
            from: self.from,
            to: self.from,
            new: dims.map(|dim| rows([new_entries, *heads, new_rows, dim], ENTRY_ROW_HEAD)),
            caches: dims.map(|dim| rows([entries, *heads, entry_rows, dim], self.order)),
            places: RowPlaces::Sequences { batch, packed: *packed, pages: per_sequence, capacity: most },
            rotation: None,
            factors: [None; 2],
            aligned: 16,
        };
        change(&mut write, &mut integers);
        Case::new(write, &integers)
    }
}

fn rotation(pairs: usize, queries: HeadRows) -> Rotation {
    Rotation {
        dtype: DType::F32,
        positions: 40,
        strides: [pairs as i64 + 3; 2],
        pairs,
        interleaved: false,
        has_positions: false,
        queries,
        packed: false,
        local: true,
    }
}

#[test]
fn rows_go_to_their_pages() {
    for page in [None, Some(1), Some(3), Some(16), Some(64)] {
        let size = page.unwrap_or(16) as i64;
        let lengths = vec![0, 1, size - 1, size, size + 1, 23];
        for (dims, order) in
            [([64, 64], ENTRY_ROW_HEAD), ([128, 64], ENTRY_HEAD_ROW), ([256, 256], ENTRY_ROW_HEAD)]
        {
            let shape = |new, packed| Shape {
                lengths: lengths.clone(),
                new,
                page,
                dims,
                order,
                packed,
                ..Shape::default()
            };
            shape(1, false).case(|_, _| ()).check();
            shape(3, true).case(|_, _| ()).check();
        }
    }
}

#[test]
fn keys_and_queries_are_rotated() {
    for from in [DType::F16, DType::Bf16, DType::F32] {
        for (interleaved, pairs) in [(false, 32), (true, 32), (false, 8), (true, 8), (false, 4), (true, 6)] {
            for (group, new, local) in [(1, 1, true), (4, 3, true), (8, 2, false)] {
                let shape = Shape { from, new, packed: local && new > 1, ..Shape::default() };
                shape
                    .case(|write, integers| {
                        let queries = rows([3, 2 * group, new, 64], ENTRY_HEAD_ROW);
                        let dtype = if from == DType::F16 { DType::F16 } else { DType::F32 };
                        let mut turn = Rotation { interleaved, local, dtype, ..rotation(pairs, queries) };
                        if group == 4 {
                            turn.packed = true;
                            turn.queries = rows([1, 2 * group, 3 * new, 64], ENTRY_ROW_HEAD);
                            integers.push(("cu_seqlens_q", (0..4).map(|b| b * new as i64).collect()));
                        }
                        if group == 8 {
                            turn.has_positions = true;
                            integers.push(("rotary_seqlens", vec![3, 39, -4]));
                        }
                        write.rotation = Some(turn);
                    })
                    .check();
            }
        }
    }
}

#[test]
fn caches_of_8_bits_are_divided_by_their_factors() {
    for (to, strides) in [(DType::E4m3, [[2, 1], [0, 0]]), (DType::E5m2, [[0, 1], [3, 0]])] {
        for from in [DType::F16, DType::Bf16, DType::F32] {
            let case = Shape { from, ..Shape::default() }.case(|write, _| {
                (write.to, write.factors) = (to, strides.map(Some));
                write.rotation = Some(rotation(16, rows([3, 2, 1, 64], ENTRY_ROW_HEAD)));
            });
            case.check();
        }
    }
}

/// Lengths, page tables, starts and positions that are no such numbers: nothing outside is read or written,
/// and rows without a place are left out.
#[test]
fn hostile_arrays_lead_nowhere() {
    let hostile = [i64::from(i32::MIN), -1, 1 << 30, i64::from(i32::MAX), 4, 0, 99];
    for (shift, packed) in (0..hostile.len()).flat_map(|shift| [(shift, false), (shift, true)]) {
        let value = |i: usize| hostile[(i + shift) % hostile.len()];
        for page in [None, Some(3)] {
            let case = Shape { new: 2, page, packed, ..Shape::default() }.case(|write, integers| {
                for (name, values) in integers.iter_mut() {
                    let is_table = *name == "page_table";
                    // Different lengths lead to different rows: no two CTAs write one place.
                    values.iter_mut().enumerate().for_each(|(i, n)| {
                        if !is_table || i % 2 == 0 {
                            *n = value(i);
                        }
                        if is_table && (0..19).contains(n) && i % 2 == 0 {
                            *n = -7;
                        }
                    });
                }
                if !packed {
                    let turn = rotation(16, rows([3, 2, 1, 64], ENTRY_ROW_HEAD));
                    write.rotation = Some(Rotation { has_positions: true, ..turn });
                    integers.push(("rotary_seqlens", (0..3).map(value).collect()));
                }
            });
            let found = case.run(None).unwrap();
            if !packed {
                let expected = case.expected();
                assert!(found == expected, "{shift} {page:?}");
            }
        }
    }
}

#[test]
fn slots_are_rows_of_the_cache() {
    for (wide, page) in [(true, 16), (false, 16), (true, 1), (true, 3)] {
        let far = if wide { i64::MAX } else { i64::from(i32::MAX) };
        let slots = vec![5, -1, 0, 47, 48, far, 31, i64::from(i32::MIN)];
        let pool = |dim| rows([48 / page, 2, page, dim], ENTRY_HEAD_ROW);
        let write = CacheWrite {
            from: DType::Bf16,
            to: DType::Bf16,
            new: [64, 128].map(|dim| rows([1, 2, slots.len(), dim], ENTRY_ROW_HEAD)),
            caches: [64, 128].map(pool),
            places: RowPlaces::Slots { wide },
            rotation: None,
            factors: [None; 2],
            aligned: 8,
        };
        Case::new(write, &[("slots", slots.clone())]).check();
        let quantised = CacheWrite { to: DType::E4m3, factors: [None, Some([0, 1])], ..write };
        Case::new(quantised, &[("slots", slots)]).check();
    }
}

/// Without one of the comparisons that leave rows out, the kernel writes outside of the cache.
#[test]
fn every_comparison_with_an_end_is_needed() {
    let slots = |slots: Vec<i64>| {
        let pool = rows([3, 2, 16, 64], ENTRY_ROW_HEAD);
        let new = rows([1, 2, slots.len(), 64], ENTRY_ROW_HEAD);
        let write = CacheWrite {
            from: DType::F16,
            to: DType::F16,
            new: [new; 2],
            caches: [pool; 2],
            places: RowPlaces::Slots { wide: true },
            rotation: None,
            factors: [None; 2],
            aligned: 8,
        };
        Case::new(write, &[("slots", slots)])
    };
    let sequences = Shape::default().case(|_, integers| integers[1].1.fill(1 << 20));
    let full = Shape { page: None, lengths: vec![3, 9, 30], ..Shape::default() }.case(|write, integers| {
        integers[0].1[2] = 31;
        let RowPlaces::Sequences { capacity, .. } = write.places else { return };
        assert_eq!(capacity, 31);
    });
    for case in [slots(vec![48]), slots(vec![-1]), sequences, full] {
        case.check();
        let is_exit: fn(&str) -> bool = |line| line.trim_end().ends_with("exit;");
        let finding = case.run(Some(is_exit)).unwrap_err();
        assert!(finding.contains("out_of_bounds"), "{finding}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |change: fn(&mut CacheWrite)| {
        let mut write = Shape::default().case(|_, _| ()).write;
        change(&mut write);
        cache::bind(&write, &Arch::SM_80).unwrap_err().to_string()
    };
    for (change, told) in [
        (
            (|write| write.aligned = 1) as fn(&mut CacheWrite),
            "invalid value '1 elements' for the alignment of rows with family cache",
        ),
        (|write| write.caches[1].strides.row = -64, "for the strides of v with family cache"),
        (|write| write.to = DType::Bf16, "invalid value 'bf16' for the element type of the cache"),
        (|write| write.to = DType::E4m3, "invalid value '80' for sm: expected 89 and later"),
        (|write| write.from = DType::E4m3, "invalid value 'e4m3' for the element type of new rows"),
        (
            |write| write.rotation = Some(rotation(33, write.new[0])),
            "invalid value '33' for columns of rotary_cos: expected 1 or more, at most half of head_dim",
        ),
        (|write| write.new[0].extents[0] = 1 << 31, "expected fewer than 2^31"),
    ] {
        let found = refused(change);
        assert!(found.contains(told), "{found}");
    }
}

/// Extents, strides and arrays are launch parameters.
#[test]
fn equal_codes_are_equal_texts() {
    let of = |shape: Shape| {
        let write = shape.case(|_, _| ()).write;
        let (code, contracts) = cache::bind(&write, &Arch::SM_90).unwrap();
        let program = cache::emit(&write, &Arch::SM_90).unwrap();
        assert_eq!(program.contracts, contracts);
        (code, program.module.to_string())
    };
    let first = of(Shape::default());
    let longer = Shape { lengths: vec![700, 2, 3, 4], new: 5, page: Some(64), heads: 4, ..Shape::default() };
    assert!(of(longer) == first);
    for other in [
        Shape { from: DType::Bf16, dims: [128, 128], ..Shape::default() },
        Shape { page: None, ..Shape::default() },
        Shape { packed: true, ..Shape::default() },
    ] {
        let other = of(other);
        assert!(other.0 != first.0 && other.1 != first.1);
    }
}

#[test]
fn kernels_assemble_without_spills() {
    let mut programs = Vec::new();
    for (from, interleaved) in [(DType::F16, true), (DType::Bf16, false), (DType::F32, false)] {
        for to in [from, DType::E4m3] {
            let case = Shape { from, dims: [128, 128], ..Shape::default() }.case(|write, _| {
                write.to = to;
                write.factors = [to.is_fp8().then_some([0; 2]); 2];
                let turn = rotation(64, rows([3, 8, 1, 128], ENTRY_ROW_HEAD));
                write.rotation = Some(Rotation { interleaved, ..turn });
            });
            programs.push(cache::emit(&case.write, &Arch::SM_90).unwrap().kernel(0));
        }
    }
    let Some(facts) = tools::facts(&programs.iter().collect::<Vec<_>>()) else { return };
    for (write, facts) in facts.into_iter().enumerate() {
        assert!(facts.spills == 0 && facts.registers <= 64, "{write}: {} {}", facts.spills, facts.registers);
    }
}
