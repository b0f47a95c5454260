//! The launch contract and the body of the kernel that writes into a cache.

use problem::{DType, Problem};
use ptx::{Builder, CmpOp, Dim3, F32, Global, Launch, Pointer, Pred, R32, R64, SpecialReg, Type};
use tile::divide;

use super::{CacheCode, CacheWrite, HeadRows, LENGTHS, PlaceCode, ROTATED, RotationCode, THREADS};
use crate::Arch;
use crate::contract::{Contract, KernelArray};
use crate::draft::Draft;
use crate::words::{elements, half_of, load_words, store_words};

const ENTRY: &str = "flash_write_cache";

/// A tensor's start, and its strides in bytes.
#[derive(Clone, Copy)]
struct Strided {
    start: Global,
    entry: R64,
    head: R64,
    row: R64,
}

/// Sequences and the arrays of their lengths.
struct Sequences {
    batch: R32,
    used: Global,
    starts: Option<Global>,
    table: Option<(Global, R32)>,
    capacity: R32,
    lengths: Global,
}

enum Places {
    Sequences(Sequences),
    Slots(Global),
}

struct Tables {
    cos: Global,
    sin: Global,
    strides: [R64; 2],
    positions: R32,
    of_sequences: Option<Global>,
    q: Strided,
    starts: Option<Global>,
    rotated: Global,
    heads: R32,
    rows: R32,
    tokens: R32,
}

struct Params {
    new: [Strided; 2],
    caches: [Strided; 2],
    heads: R32,
    /// Rows of an entry of the new tensors.
    rows: R32,
    tokens: R32,
    /// Entries of the caches, and the rows of each.
    entries: R32,
    entry_rows: R32,
    places: Places,
    factors: [Option<(Global, [R64; 2])>; 2],
    tables: Option<Tables>,
}

/// The kernel of a write that was checked.
pub(super) fn draft(code: &CacheCode, write: &CacheWrite, arch: &Arch) -> Draft<'static> {
    let mut k = Builder::kernel(ENTRY);
    k.max_threads(THREADS);
    let problem = Problem::mission(); // the kernel has no operand of a problem
    let mut contract = Contract::new(&problem);
    let params = Params::declare(&mut k, &mut contract, write);
    let launch = Launch::new(Dim3(write.ctas() as u32, 1, 1), Dim3(THREADS, 1, 1));
    let code = *code;
    let body = move |k: &mut Builder| Writer { code, params }.body(k);
    Draft::new(k, contract, (ENTRY, launch), arch.target(), body)
}

impl Params {
    fn declare(k: &mut Builder, c: &mut Contract<'_>, write: &CacheWrite) -> Params {
        let arrays = write.arrays();
        let starts: Vec<(&str, Global)> = arrays
            .iter()
            .map(|&KernelArray { name, bytes, access }| (name, c.array(k, name, bytes, access)))
            .collect();
        let find = |name: &str| starts.iter().find(|(other, _)| *other == name).map(|&(_, start)| start);
        let array = |name: &str| find(name).expect("the arrays of a write are known");
        let strided = |k: &mut Builder, c: &mut Contract<'_>, name: &str, tensor: &HeadRows, size: usize| {
            let [entries, heads, rows, _] = tensor.extents;
            let strides = tensor.strides;
            let mut of = |what: &str, extent: usize, stride: i64| {
                let bytes = if extent > 1 { stride * size as i64 } else { 0 };
                c.i64(k, &format!("{name}_{what}_bytes"), bytes)
            };
            let entry = of("entry", entries, strides.batch);
            let head = of("head", heads, strides.head);
            Strided { start: array(name), entry, head, row: of("row", rows, strides.row) }
        };
        let (from, to) = (write.from.bytes(), write.to.bytes());
        let new = [0, 1].map(|i| strided(k, c, ["k_new", "v_new"][i], &write.new[i], from));
        let caches = [0, 1].map(|i| strided(k, c, ["k", "v"][i], &write.caches[i], to));
        let places = match write.places {
            super::RowPlaces::Slots { .. } => Places::Slots(array("slots")),
            super::RowPlaces::Sequences { batch, pages, capacity, .. } => Places::Sequences(Sequences {
                batch: c.u32(k, "batch", batch as u32),
                used: array("cache_seqlens"),
                starts: find("cu_seqlens_k_new"),
                table: pages.map(|pages| (array("page_table"), c.u32(k, "pages_per_sequence", pages as u32))),
                capacity: c.u32(k, "capacity", capacity as u32),
                lengths: array(LENGTHS),
            }),
        };
        let factors = [0, 1].map(|i| {
            let (name, strides) = (["k_descale", "v_descale"][i], write.factors[i]?);
            let mut of = |what: &str, stride: i64| c.i64(k, &format!("{name}_{what}_bytes"), 4 * stride);
            Some((array(name), [of("batch", strides[0]), of("head", strides[1])]))
        });
        let tables = write.rotation.map(|rotation| {
            let [_, heads, rows, _] = rotation.queries.extents;
            let mut stride = |name: &str, stride: i64| {
                c.i64(k, &format!("{name}_row_bytes"), stride * rotation.dtype.bytes() as i64)
            };
            let strides = [stride("cos", rotation.strides[0]), stride("sin", rotation.strides[1])];
            Tables {
                cos: array("rotary_cos"),
                sin: array("rotary_sin"),
                strides,
                positions: c.u32(k, "positions", rotation.positions as u32),
                of_sequences: find("rotary_seqlens"),
                q: strided(k, c, "q", &rotation.queries, from),
                starts: find("cu_seqlens_q"),
                rotated: array(ROTATED),
                heads: c.u32(k, "heads_q", heads as u32),
                rows: c.u32(k, "rows_q", rows as u32),
                tokens: c.u32(k, "queries", write.queries() as u32),
            }
        });
        let [entries, _, entry_rows, _] = write.caches[0].extents;
        Params {
            new,
            caches,
            heads: c.u32(k, "heads_kv", write.new[0].extents[1] as u32),
            rows: c.u32(k, "rows_new", write.new[0].extents[2] as u32),
            tokens: c.u32(k, "tokens", write.tokens() as u32),
            entries: c.u32(k, "entries", entries as u32),
            entry_rows: c.u32(k, "entry_rows", entry_rows as u32),
            places,
            factors,
            tables,
        }
    }
}

/// The row of the tables of cosines and sines for a position.
#[derive(Clone, Copy)]
struct Angles {
    cos: Global,
    sin: Global,
}

/// The rows of one head that a thread copies from and to, and the divisor of 8-bit elements.
struct HeadRow {
    from: Global,
    to: Global,
    factor: Option<F32>,
}

struct Writer {
    code: CacheCode,
    params: Params,
}

impl Writer {
    /// A CTA writes one new row, rotates one query row, or writes lengths.
    fn body(&self, k: &mut Builder) {
        let cta = k.special(SpecialReg::CtaidX);
        let thread = k.special(SpecialReg::TidX);
        let p = &self.params;
        let is_new = k.setp_u(CmpOp::Lt, cta, p.tokens);
        k.if_else(
            is_new,
            |k| self.write(k, cta, thread),
            |k| {
                let rest = k.sub(cta, p.tokens);
                let Some(tables) = &p.tables else { return self.write_lengths(k, rest, thread) };
                let is_query = k.setp_u(CmpOp::Lt, rest, tables.tokens);
                k.if_else(
                    is_query,
                    |k| self.rotate_queries(k, tables, rest, thread),
                    |k| {
                        let rest = k.sub(rest, tables.tokens);
                        self.write_lengths(k, rest, thread);
                    },
                );
            },
        );
    }

    /// Writes new row `token` of K and V in all heads.
    fn write(&self, k: &mut Builder, token: R32, thread: R32) {
        let p = &self.params;
        let (entry, row) = match self.code.places {
            PlaceCode::Sequences { packed: false, .. } => quotient(k, token, p.rows),
            _ => (k.mov(0), token),
        };
        let (to, sequence, angles) = match &p.places {
            Places::Slots(slots) => (self.place_of_slot(k, *slots, token), k.mov(0), None),
            Places::Sequences(sequences) => {
                let (sequence, index) = self.owner(k, sequences, entry, row);
                let used = k.index(sequences.used, sequence, 4);
                let used: R32 = k.ld(used);
                let to = self.place(k, sequences, used, [sequence, index]);
                let tables = p.tables.as_ref();
                let angles = tables.map(|tables| self.angles(k, tables, [sequence, used, index]));
                (to, sequence, angles)
            }
        };
        let [of_keys, of_values] = self.code.dims.map(|dim| dim / self.code.width);
        let keys = k.mul(p.heads, of_keys);
        let all = k.mad(p.heads, of_values, keys);
        let unit = k.mov(thread);
        let one = |k: &mut Builder, i: usize, (unit, of_row): (R32, u32), angles: Option<Angles>| {
            let head = divide(k, unit, of_row);
            let before = k.mul(head, of_row);
            let unit = k.sub(unit, before);
            let row = HeadRow {
                from: address(k, &p.new[i], [entry, head, row]),
                to: address(k, &p.caches[i], [to[0], head, to[1]]),
                factor: p.factors[i].map(|factors| factor(k, factors, [sequence, head])),
            };
            self.unit(k, (&row, self.code.to), unit, angles);
        };
        k.while_(
            |k| k.setp_u(CmpOp::Lt, unit, all),
            |k| {
                let is_key = k.setp_u(CmpOp::Lt, unit, keys);
                k.if_else(
                    is_key,
                    |k| one(k, 0, (unit, of_keys), angles),
                    |k| {
                        let unit = k.sub(unit, keys);
                        one(k, 1, (unit, of_values), None);
                    },
                );
                k.add_to(unit, unit, THREADS);
            },
        );
    }

    /// The sequence of new row `row`, and the index of the row in the sequence. A row of no sequence ends the
    /// CTA.
    fn owner(&self, k: &mut Builder, sequences: &Sequences, entry: R32, row: R32) -> (R32, R32) {
        let Some(starts) = sequences.starts else { return (entry, row) };
        let (sequence, [start, end]) = search(k, starts, sequences.batch, (row, self.params.tokens));
        let before = k.setp_u(CmpOp::Lt, row, start);
        k.exit_if(before);
        let behind = k.setp_u(CmpOp::Ge, row, end);
        k.exit_if(behind);
        (sequence, k.sub(row, start))
    }

    /// The entry of the cache and the row in it of new row `index` of a sequence, which has `used` rows. A
    /// row without a place ends the CTA.
    fn place(&self, k: &mut Builder, s: &Sequences, used: R32, [sequence, index]: [R32; 2]) -> [R32; 2] {
        let used = cut(k, used, s.capacity);
        let row = k.add(used, index);
        let full = k.setp_u(CmpOp::Ge, row, s.capacity);
        k.exit_if(full);
        let Some((table, of_sequence)) = s.table else { return [sequence, row] };
        let (page, row) = quotient(k, row, self.params.entry_rows);
        let entries = k.mul_wide_u(sequence, of_sequence);
        let table = Global { base: k.mad(entries, 4, table.base), ..table };
        let at = k.index(table, page, 4);
        let page: R32 = k.ld(at);
        // A negative entry is a large unsigned number.
        let outside = k.setp_u(CmpOp::Ge, page, self.params.entries);
        k.exit_if(outside);
        [page, row]
    }

    /// The entry of the cache and the row in it of the slot of a row. A row without a slot ends the CTA.
    fn place_of_slot(&self, k: &mut Builder, slots: Global, token: R32) -> [R32; 2] {
        let p = &self.params;
        let all = k.mul(p.entries, p.entry_rows);
        let slot = match self.code.places {
            PlaceCode::Slots { wide: true } => {
                let at = k.index(slots, token, 8);
                let slot: R64 = k.ld(at);
                let most = k.zext(all);
                let outside = k.setp_u(CmpOp::Ge, slot, most);
                k.exit_if(outside);
                k.trunc(slot)
            }
            _ => {
                let at = k.index(slots, token, 4);
                let slot: R32 = k.ld(at);
                let outside = k.setp_u(CmpOp::Ge, slot, all);
                k.exit_if(outside);
                slot
            }
        };
        let (entry, row) = quotient(k, slot, p.entry_rows);
        [entry, row]
    }

    /// Rotates row `token` of the queries in all heads.
    fn rotate_queries(&self, k: &mut Builder, tables: &Tables, token: R32, thread: R32) {
        let Places::Sequences(sequences) = &self.params.places else { return };
        let (entry, row, sequence, index) = match tables.starts {
            None => {
                let (entry, row) = quotient(k, token, tables.rows);
                (entry, row, entry, row)
            }
            Some(starts) => {
                let (sequence, [start, _]) = search(k, starts, sequences.batch, (token, tables.tokens));
                (k.mov(0), token, sequence, k.sub(token, start))
            }
        };
        let used = k.index(sequences.used, sequence, 4);
        let used: R32 = k.ld(used);
        let is_local = self.code.rotation.is_some_and(|rotation| rotation.local);
        let index = if is_local { index } else { k.mov(0) };
        let angles = Some(self.angles(k, tables, [sequence, used, index]));
        let dim = self.code.dims[0];
        let of_row = dim / self.code.width;
        let all = k.mul(tables.heads, of_row);
        let unit = k.mov(thread);
        let row_bytes = dim * self.code.from.bytes() as u32;
        let first = k.mul_wide_u(token, tables.heads);
        k.while_(
            |k| k.setp_u(CmpOp::Lt, unit, all),
            |k| {
                let head = divide(k, unit, of_row);
                let before = k.mul(head, of_row);
                let in_row = k.sub(unit, before);
                let wide = k.zext(head);
                let number = k.add(first, wide);
                let to = Global {
                    base: k.mad(number, i64::from(row_bytes), tables.rotated.base),
                    ..tables.rotated
                };
                let row = HeadRow { from: address(k, &tables.q, [entry, head, row]), to, factor: None };
                self.unit(k, (&row, self.code.from), in_row, angles);
                k.add_to(unit, unit, THREADS);
            },
        );
    }

    /// Writes the lengths after the append, one in each thread.
    fn write_lengths(&self, k: &mut Builder, number: R32, thread: R32) {
        let Places::Sequences(s) = &self.params.places else { return };
        let sequence = k.mad(number, THREADS, thread);
        let exists = k.setp_u(CmpOp::Lt, sequence, s.batch);
        k.if_(exists, |k| {
            let used = k.index(s.used, sequence, 4);
            let used: R32 = k.ld(used);
            let used = cut(k, used, s.capacity);
            let new = match s.starts {
                None => self.params.rows,
                Some(starts) => {
                    let [start, end] = span(k, starts, sequence, self.params.tokens);
                    let rows = k.sub(end, start);
                    k.max_s(rows, 0)
                }
            };
            let length = k.add(used, new);
            let length = k.min_u(length, s.capacity);
            let to = k.index(s.lengths, sequence, 4);
            k.st(to, length);
        });
    }

    /// The angles of row `index` of a sequence with `used` rows. Positions outside of the tables take the
    /// nearest row.
    fn angles(&self, k: &mut Builder, tables: &Tables, [sequence, used, index]: [R32; 3]) -> Angles {
        let first = match tables.of_sequences {
            None => used,
            Some(array) => {
                let at = k.index(array, sequence, 4);
                k.ld(at)
            }
        };
        let last = k.sub(tables.positions, 1);
        let first = cut(k, first, last);
        let position = k.add(first, index);
        let position = k.min_u(position, last);
        let position = k.zext(position);
        let [cos, sin] = [(tables.cos, tables.strides[0]), (tables.sin, tables.strides[1])]
            .map(|(table, stride)| Global { base: k.mad(position, stride, table.base), ..table });
        Angles { cos, sin }
    }

    /// Copies a unit of a row, or rotates it if it belongs to the first pairs.
    fn unit(&self, k: &mut Builder, (row, to): (&HeadRow, DType), unit: R32, angles: Option<Angles>) {
        let copy = |k: &mut Builder, column: R32| {
            let words = self.load(k, row.from, column);
            if to == self.code.from {
                self.store_words(k, row.to, column, &words);
            } else {
                let elements = elements(k, self.code.from, &words);
                self.store(k, (row, to), column, &elements);
            }
        };
        let column = k.mul(unit, self.code.width);
        let (Some(angles), Some(rotation)) = (angles, self.code.rotation) else { return copy(k, column) };
        // In halves, the unit of the first half also rotates its partner, and that of the second has nothing
        // to do.
        let turning = if rotation.interleaved { 2 * rotation.pairs } else { rotation.pairs };
        let turns = k.setp_u(CmpOp::Lt, column, turning);
        let copies = k.setp_u(CmpOp::Ge, column, 2 * rotation.pairs);
        k.if_(turns, |k| self.rotate(k, (row, to), column, (angles, rotation)));
        k.if_(copies, |k| copy(k, column));
    }

    /// Rotates the pairs of a unit.
    fn rotate(
        &self,
        k: &mut Builder,
        (row, to): (&HeadRow, DType),
        column: R32,
        (angles, rotation): (Angles, RotationCode),
    ) {
        let words = self.load(k, row.from, column);
        let first = elements(k, self.code.from, &words);
        if rotation.interleaved {
            let pair = k.shr_u(column, 1);
            let mut turned = Vec::new();
            for (number, xy) in (0..).zip(first.chunks_exact(2)) {
                let at = angles.load(k, rotation.dtype, pair, number);
                turned.extend(turn(k, [xy[0], xy[1]], at));
            }
            return self.store(k, (row, to), column, &turned);
        }
        let partner = k.add(column, rotation.pairs);
        let words = self.load(k, row.from, partner);
        let second = elements(k, self.code.from, &words);
        let (mut low, mut high) = (Vec::new(), Vec::new());
        for (number, (&x, &y)) in (0..).zip(first.iter().zip(&second)) {
            let at = angles.load(k, rotation.dtype, column, number);
            let [a, b] = turn(k, [x, y], at);
            low.push(a);
            high.push(b);
        }
        self.store(k, (row, to), column, &low);
        self.store(k, (row, to), partner, &high);
    }

    /// The words of a unit of the new rows.
    fn load(&self, k: &mut Builder, row: Global, column: R32) -> Vec<R32> {
        let size = self.code.from.bytes() as u32;
        let at = k.index(row, column, size);
        load_words(k, at, self.code.width * size)
    }

    fn store_words(&self, k: &mut Builder, row: Global, column: R32, words: &[R32]) {
        let at = k.index(row, column, 4 * words.len() as u32 / self.code.width);
        store_words(k, at, words);
    }

    /// Rounds the elements of a unit and stores them.
    fn store(&self, k: &mut Builder, (row, to): (&HeadRow, DType), column: R32, elements: &[F32]) {
        let words: Vec<R32> = match (half_of(to), to) {
            (Some(half), _) => elements.chunks_exact(2).map(|xy| k.pack(half, xy[0], xy[1])).collect(),
            (None, DType::F32) => elements.iter().map(|&x| k.to_bits(x)).collect(),
            (None, _) => {
                let pair = if to == DType::E5m2 { Type::E5m2x2 } else { Type::E4m3x2 };
                let scaled: Vec<F32> =
                    elements.iter().map(|&x| row.factor.map_or(x, |factor| k.div(x, factor))).collect();
                scaled.chunks_exact(4).map(|x| k.pack_fp8(pair, [x[0], x[1], x[2], x[3]])).collect()
            }
        };
        self.store_words(k, row.to, column, &words);
    }
}

impl Angles {
    /// The cosine and the sine of pair `first + number`.
    fn load(&self, k: &mut Builder, dtype: DType, first: R32, number: i64) -> [F32; 2] {
        let size = dtype.bytes();
        [self.cos, self.sin].map(|row| {
            let at = k.index(row, first, size as u32).at(number * size as i64);
            match half_of(dtype) {
                Some(half) => {
                    let bits = k.ld(at);
                    k.to_f32(half, bits)
                }
                None => k.ld(at),
            }
        })
    }
}

/// A pair after the rotation, in the order of operations of the CPU.
fn turn(k: &mut Builder, [x, y]: [F32; 2], [cos, sin]: [F32; 2]) -> [F32; 2] {
    let [xc, ys, xs, yc] = [(x, cos), (y, sin), (x, sin), (y, cos)].map(|(a, b)| k.mul(a, b));
    [k.sub(xc, ys), k.add(xs, yc)]
}

/// `n / by` and `n mod by`.
fn quotient(k: &mut Builder, n: R32, by: R32) -> (R32, R32) {
    let quotient = k.div_u(n, by);
    let before = k.mul(quotient, by);
    (quotient, k.sub(n, before))
}

/// The address of a row.
fn address(k: &mut Builder, tensor: &Strided, [entry, head, row]: [R32; 3]) -> Global {
    let [entry, head, row] = [entry, head, row].map(|n| k.zext(n));
    let at = k.mad(entry, tensor.entry, tensor.start.base);
    let at = k.mad(head, tensor.head, at);
    Global { base: k.mad(row, tensor.row, at), ..tensor.start }
}

/// The descale factor of a head of a sequence.
fn factor(k: &mut Builder, (start, [batch, head]): (Global, [R64; 2]), at: [R32; 2]) -> F32 {
    let [of_batch, of_head] = at.map(|n| k.zext(n));
    let base = k.mad(of_batch, batch, start.base);
    let base = k.mad(of_head, head, base);
    k.ld(Global { base, ..start })
}

/// Clamps the signed number `n` to `0..=limit`.
fn cut(k: &mut Builder, n: R32, limit: R32) -> R32 {
    let n = k.max_s(n, 0);
    k.min_s(n, limit)
}

/// The first row and the end of a packed sequence, both at most `limit`.
fn span(k: &mut Builder, starts: Global, sequence: R32, limit: R32) -> [R32; 2] {
    let at = k.index(starts, sequence, 4);
    [at, at.at(4)].map(|at| {
        let start: R32 = k.ld(at);
        cut(k, start, limit)
    })
}

/// The last sequence that begins at or before a packed row, and its span. The search ends at a sequence for
/// any contents of the array.
fn search(k: &mut Builder, starts: Global, batch: R32, (row, limit): (R32, R32)) -> (R32, [R32; 2]) {
    let (low, high) = (k.mov(0), k.mov(batch));
    k.while_(
        |k| {
            let left = k.sub(high, low);
            k.setp_u(CmpOp::Gt, left, 1)
        },
        |k| {
            let sum = k.add(low, high);
            let middle = k.shr_u(sum, 1);
            let at = k.index(starts, middle, 4);
            let start: R32 = k.ld(at);
            let start = cut(k, start, limit);
            let reached: Pred = k.setp_u(CmpOp::Le, start, row);
            k.selp_to(low, middle, low, reached);
            k.selp_to(high, high, middle, reached);
        },
    );
    let found = span(k, starts, low, limit);
    (low, found)
}
