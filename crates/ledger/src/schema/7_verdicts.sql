-- The verdicts of a check are passed, failed and incomplete; its stage is `check`, its table is `check_result`. The rows of
-- earlier runs get these words too, so that a query needs one word for each. A table whose constraint lists words is made
-- anew, and SQLite computes the checksums of its rows again.

CREATE TABLE check_result (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('check_result', id, outcome, candidate, judge, verdict, reasons, hazards, error_rel, seconds)) STORED,
  id INTEGER PRIMARY KEY,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER NOT NULL REFERENCES candidate,
  judge TEXT NOT NULL CHECK (judge IN ('emulator', 'device')),
  verdict TEXT NOT NULL CHECK (verdict IN ('passed', 'incomplete', 'failed')),
  reasons TEXT NOT NULL,
  hazards TEXT NOT NULL,
  error_rel REAL,
  seconds REAL NOT NULL
) STRICT;
INSERT INTO check_result (id, outcome, candidate, judge, verdict, reasons, hazards, error_rel, seconds)
  SELECT id, outcome, candidate, judge, CASE verdict WHEN 'proven' THEN 'passed' WHEN 'refuted' THEN 'failed' ELSE verdict END,
      reasons, hazards, error_rel, seconds FROM proof;
DROP TABLE proof;
CREATE INDEX check_result_by_candidate ON check_result (candidate);
ALTER TABLE standing RENAME COLUMN proven TO passed;
ALTER TABLE tally RENAME COLUMN proven TO passed;
CREATE TRIGGER check_result_counts AFTER INSERT ON check_result
WHEN new.verdict = 'passed' AND (SELECT passed FROM standing WHERE candidate = new.candidate) = 0 BEGIN
  UPDATE standing SET passed = 1 WHERE candidate = new.candidate;
  UPDATE tally SET passed = passed + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
END;

CREATE TABLE new_outcome (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('outcome', id, at, run, candidate, stage, problem, seconds, device_seconds, finding)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  run INTEGER NOT NULL REFERENCES run,
  candidate INTEGER NOT NULL REFERENCES candidate,
  stage TEXT NOT NULL CHECK (stage IN ('propose', 'screen', 'check', 'microbench', 'race', 'held_out')),
  problem INTEGER NOT NULL REFERENCES problem,
  seconds REAL NOT NULL,
  device_seconds REAL NOT NULL,
  finding TEXT NOT NULL CHECK (finding IN ('screened', 'judged', 'timed', 'rejected')),
  UNIQUE (candidate, stage, problem)
) STRICT;
INSERT INTO new_outcome (id, at, run, candidate, stage, problem, seconds, device_seconds, finding)
  SELECT id, at, run, candidate, iif(stage = 'prove', 'check', stage), problem, seconds, device_seconds, finding FROM outcome;
DROP TABLE outcome;
ALTER TABLE new_outcome RENAME TO outcome;
CREATE INDEX outcome_by_run ON outcome (run, id);
CREATE TRIGGER outcome_counts AFTER INSERT ON outcome BEGIN
  UPDATE standing SET stage = new.stage WHERE candidate = new.candidate;
  INSERT INTO cost VALUES (new.run, new.stage, 1, new.seconds, new.device_seconds)
    ON CONFLICT DO UPDATE SET
      tasks = tasks + 1, seconds = seconds + new.seconds, device_seconds = device_seconds + new.device_seconds;
END;
CREATE TRIGGER outcome_passes AFTER INSERT ON outcome BEGIN
  INSERT INTO passage SELECT new.run, arm, new.stage, 1 FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET entered = entered + 1;
END;

CREATE TABLE new_rejection (
  checksum INTEGER NOT NULL GENERATED ALWAYS AS
    (row_checksum('rejection', id, at, outcome, candidate, stage, reason, detail)) STORED,
  id INTEGER PRIMARY KEY,
  at INTEGER NOT NULL,
  outcome INTEGER REFERENCES outcome,
  candidate INTEGER NOT NULL REFERENCES candidate,
  stage TEXT NOT NULL CHECK (stage IN ('propose', 'screen', 'check', 'microbench', 'race', 'held_out')),
  reason TEXT NOT NULL,
  detail TEXT NOT NULL
) STRICT;
INSERT INTO new_rejection (id, at, outcome, candidate, stage, reason, detail)
  SELECT id, at, outcome, candidate, iif(stage = 'prove', 'check', stage), iif(reason = 'refuted', 'failed', reason), detail
    FROM rejection;
DROP TABLE rejection;
ALTER TABLE new_rejection RENAME TO rejection;
CREATE INDEX rejection_by_candidate ON rejection (candidate);
CREATE TRIGGER rejection_counts AFTER INSERT ON rejection BEGIN
  INSERT INTO death SELECT run, arm, new.stage, new.reason, 1, new.id FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET candidates = candidates + 1, latest = new.id;
  UPDATE tally SET rejected = rejected + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET rejected = rejected + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
  UPDATE standing SET rejected = new.reason WHERE candidate = new.candidate AND new.stage <> 'held_out';
END;

UPDATE standing SET stage = 'check' WHERE stage = 'prove';
UPDATE standing SET rejected = 'failed' WHERE rejected = 'refuted';
UPDATE passage SET stage = 'check' WHERE stage = 'prove';
UPDATE cost SET what = 'check' WHERE what = 'prove';
UPDATE death SET stage = iif(stage = 'prove', 'check', stage), reason = iif(reason = 'refuted', 'failed', reason)
  WHERE stage = 'prove' OR reason = 'refuted';
