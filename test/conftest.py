# SPDX-License-Identifier: Apache-2.0
"""pytest prints a line of progress instead of dots. Tests that take more than 3 seconds are marked slow; TOKA_TESTS=fast leaves
them out (test/run.sh). Tests that compare times are marked alone: test/run.sh runs them when nothing else runs."""
import sys
import time


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than 3 seconds")
    config.addinivalue_line("markers", "alone: compares times; nothing else may run")


class Progress:
    def __init__(self, n_tests):
        self.n_tests, self.n_done, self.n_failed, self.begin, self.printed = n_tests, 0, 0, time.time(), 0

    def show(self, module):
        seconds = time.time() - self.begin
        line = f"{self.n_done:4d} of {self.n_tests} tests, {self.n_failed} failed, {seconds:4.0f} s, {module}"
        if sys.__stdout__.isatty():
            print("\r" + line.ljust(78), end="" if self.n_done < self.n_tests else "\n", flush=True, file=sys.__stdout__)
        elif seconds > self.printed + 20 or self.n_done == self.n_tests:
            self.printed = seconds
            print(line, flush=True, file=sys.__stdout__)


progress = None


def pytest_collection_finish(session):
    global progress
    progress = Progress(len(session.items))


def pytest_runtest_logreport(report):
    progress.n_failed += report.failed
    if report.when == "teardown":
        progress.n_done += 1
        progress.show(report.nodeid.split("::")[0])


def pytest_report_teststatus(report, config):
    """No letter for a test that passed or was skipped: the line above counts it."""
    if report.skipped and not hasattr(report, "wasxfail"):
        return "skipped", "", "SKIPPED"
    if report.when == "call" and report.passed:
        return "passed", "", "PASSED"
