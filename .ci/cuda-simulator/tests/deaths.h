// Programs that the simulator must end.

#pragma once

#include <csignal>
#include <cstring>
#include <functional>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include "expect.h"

// Runs `program` in a process of its own, which must abort with a message that holds `text`. Call it before any of CUDA's functions:
// a copy of a process has none of its threads.
inline void expect_death(const char *text, const std::function<void()> &program) {
    int ends[2];
    EXPECT(pipe(ends) == 0);
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        program();
        exit(0); // what is looked at when a program ends is looked at here
    }
    close(ends[1]);
    std::string said;
    char piece[512];
    ssize_t length;
    while ((length = read(ends[0], piece, sizeof piece)) > 0) {
        said.append(piece, (size_t)length);
    }
    close(ends[0]);
    int status;
    EXPECT(waitpid(child, &status, 0) == child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT || said.find(text) == std::string::npos) {
        fprintf(stderr, "expected an abort that says \"%s\", got status %d and: %s\n", text, status, said.c_str());
        exit(1);
    }
}
